"""Spawned ranks: the same tokens as one rank, complete error messages, and no process left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from octavo.device import Device
from octavo.errors import ConfigError, EngineDead
from octavo.executor.local import LocalExecutor
from octavo.executor.processes import ProcessExecutor, _Rank
from octavo.executor.side_requests import SideRequests
from octavo.messages import RankFailed
from octavo.messages.side import SideReply, SleepRank
from octavo.weights.sources.source import ModelSource
from octavo.worker.main import _last_words
from octavo.worker.side import FinishedPlans, SideWork
from tests.processes import is_alive
from tests.worker.tiny import GREEDY, MIXED, Driver, random_prompts, tiny_config, write_tiny_llama

PROMPTS = random_prompts(6, seed=21)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def executor(source: ModelSource) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(tiny_config(tensor_parallel_size=2), source)
    yield executor
    executor.close()


def pids(executor: ProcessExecutor) -> list[int]:
    return [rank._process.pid for rank in executor._ranks]


def test_two_ranks_give_one_ranks_tokens_also_a_step_ahead(source: ModelSource, executor: ProcessExecutor) -> None:
    local = LocalExecutor(tiny_config(), source)
    alone = local.start()
    driver = Driver(local, alone.num_pages)
    expected = driver.generate([driver.enter(i, p, MIXED[i], i) for i, p in enumerate(PROMPTS)], NUM_TOKENS)
    local.close()

    report = executor.start()
    assert report.device == "2 ranks, each cpu (1 thread)"
    assert (report.page_bytes, report.num_pages) == (alone.page_bytes, alone.num_pages)
    driver = Driver(executor, report.num_pages, seed=3)
    together = [driver.enter(7 - i, p, MIXED[i], i) for i, p in enumerate(PROMPTS)]
    driver.submit(*((s, len(s.tokens)) for s in together))
    for _ in range(NUM_TOKENS - 1):
        driver.submit(*((s, 1) for s in together))
        driver.collect()
    driver.collect()
    assert [s.output for s in together] == expected

    processes = pids(executor)
    executor.close()
    executor.close()
    assert not any(map(is_alive, processes))
    with pytest.raises(EngineDead):
        executor.collect()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_the_engines_death_at_once(executor: ProcessExecutor, victim: int) -> None:
    driver = Driver(executor, executor.start().num_pages)
    sequence = driver.enter(0, PROMPTS[0], GREEDY, 0)
    driver.generate([sequence], 2)
    os.kill(pids(executor)[1 - victim], signal.SIGSTOP)  # it does not end by itself, as one that waits for the other
    os.kill(pids(executor)[victim], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDead, match=f"rank {victim} was killed by signal 9"):
        driver.generate([sequence], 10)
    assert time.monotonic() - began < 5
    processes = pids(executor)
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 4, "streams wait for the next engine"
    assert not any(map(is_alive, processes))


def test_a_signal_to_the_whole_group_does_not_cut_the_work_short(executor: ProcessExecutor) -> None:
    driver = Driver(executor, executor.start().num_pages)
    sequence = driver.enter(0, PROMPTS[0], GREEDY, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        for pid in pids(executor):
            os.kill(pid, number)
    assert len(driver.generate([sequence], 4)[0]) == 4
    executor.close()
    endings = [rank.ending(0) for rank in executor._ranks]
    assert None not in endings and -signal.SIGKILL not in endings  # by the lifeline, not by a kill after a timeout


def test_ranks_print_to_stderr_and_leave_stdout_to_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    rank = _Rank(0)
    try:
        descriptors = Path(f"/proc/{rank._process.pid}/fd")
        assert os.path.sameopenfile(1, 2) is False
        assert os.path.samestat((descriptors / "1").stat(), os.fstat(2))
        assert os.path.samestat((descriptors / "2").stat(), os.fstat(2))
    finally:
        rank.close_pipes()
        rank.end(5)


def test_a_ranks_config_error_arrives_as_itself(source: ModelSource, capfd: pytest.CaptureFixture[str]) -> None:
    executor = ProcessExecutor(tiny_config(tensor_parallel_size=2, max_model_len=1000), source)
    with pytest.raises(ConfigError, match="--max-model-len 1000 is beyond"):
        executor.start()
    assert not any(map(is_alive, pids(executor)))
    assert "is beyond" not in capfd.readouterr().err  # the engine prints it, once


def test_a_rank_repeats_no_config_error_that_another_has_reported(caplog: pytest.LogCaptureFixture) -> None:
    parents, ranks = Pipe()
    parents.close()
    assert _last_words(ranks, RankFailed(True, "--tensor-parallel-size 7 does not divide it")) == 1
    assert not caplog.messages
    assert _last_words(ranks, RankFailed(False, "Traceback: a bug of its own")) == 1
    assert caplog.messages == ["a rank ends: Traceback: a bug of its own"]
    ranks.close()


def test_a_ranks_bug_arrives_with_its_traceback(executor: ProcessExecutor) -> None:
    driver = Driver(executor, executor.start().num_pages)
    sequence = driver.enter(99, PROMPTS[0], GREEDY, 0)  # there are 8 rows
    with pytest.raises(EngineDead, match="Traceback"):
        driver.generate([sequence], 1)


def test_what_fails_beside_the_steps_is_the_engines_death(executor: ProcessExecutor) -> None:
    executor.start()
    with pytest.raises(EngineDead, match="rank 0"):
        executor.sleep(["no page"], False, lambda: None)  # type: ignore[list-item]


def test_ranks_that_slept_compute_the_same(executor: ProcessExecutor) -> None:
    driver = Driver(executor, executor.start().num_pages)
    expected = driver.generate([driver.enter(0, PROMPTS[0], GREEDY, 0)], NUM_TOKENS)
    for row in (1, 2):
        executor.sleep(driver.free[-4:], False, lambda: None)
        executor.wake_up(lambda: None)
        assert driver.generate([driver.enter(row, PROMPTS[0], GREEDY, 0)], NUM_TOKENS) == expected


class _SleepyRunner:
    """What a rank does when it is told to sleep, in order; it takes two parts to move its weights."""

    def __init__(self) -> None:
        self.device = Device("cpu")
        self.pages = self
        self.did: list[str] = []

    def give_back(self, pages: list[int]) -> None:
        self.did.append(f"gave back {pages}")

    def sleep(self, keeps_pages: bool, moved: Callable[[], None]) -> None:
        moved()
        moved()
        self.did.append("slept")


def test_a_rank_sleeps_after_its_last_step_and_says_that_it_moves_on() -> None:
    """Another rank has sent the last step's result; this one still computes it."""
    ours, theirs = Pipe()
    runner, finished, parts = _SleepyRunner(), FinishedPlans(), []
    threading.Thread(target=SideWork(theirs, runner, finished).serve, daemon=True).start()  # type: ignore[arg-type]
    requests: SimpleQueue[list[SideReply] | None] = SimpleQueue()
    side = SideRequests([ours])
    finished.add()
    side.ask([0], lambda number: SleepRank(number, [3, 4], False, 2), requests.put, lambda: parts.append(1))
    with pytest.raises(Empty):
        requests.get(timeout=0.2)
    assert not runner.did
    finished.add()
    replies = requests.get(timeout=10)
    assert replies is not None and [reply.is_over for reply in replies] == [True]
    assert runner.did == ["gave back [3, 4]", "slept"] and len(parts) == 2
    theirs.close()


def test_ranks_end_with_a_parent_that_is_killed(source: ModelSource) -> None:
    script = """
        import sys, threading, time
        from octavo.executor.processes import ProcessExecutor
        from octavo.weights.sources.source import local
        from pathlib import Path
        from tests.worker.tiny import tiny_config

        def start():
            executor = ProcessExecutor(tiny_config(tensor_parallel_size=2), local(Path(sys.argv[1])))
            executor.start()
            print(*[rank._process.pid for rank in executor._ranks], flush=True)

        # From a thread that ends: ranks must outlive the thread, and not the process.
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(source.path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    ranks = [int(word) for word in parent.stdout.readline().split()]
    assert len(ranks) == 2
    assert all(map(is_alive, ranks))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, ranks))
