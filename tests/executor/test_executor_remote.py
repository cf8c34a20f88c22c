"""Ranks that a launcher starts: they connect back with the engine's secret, meet at an address of their network, and end with it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.errors import ConfigError, EngineDead
from octavo.executor import processes
from octavo.executor.local import LocalExecutor
from octavo.executor.processes import ProcessExecutor
from octavo.weights.sources.source import ModelSource
from tests.executor.namespaces import CommandLauncher, two_hosts
from tests.worker.tiny import GREEDY, Driver, random_prompts, tiny_config, write_tiny_llama

PROMPTS = random_prompts(3, seed=8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def expected(source: ModelSource) -> list[list[int]]:
    return tokens_of(LocalExecutor(tiny_config(), source))


def tokens_of(executor: LocalExecutor | ProcessExecutor) -> list[list[int]]:
    try:
        report = executor.start()
        driver = Driver(executor, report.num_pages, num_stages=report.num_stages)
        return driver.generate([driver.enter(i, p, GREEDY, i) for i, p in enumerate(PROMPTS)], 8)
    finally:
        executor.close()


def test_launched_ranks_give_one_ranks_tokens_and_end_with_the_executor(
    source: ModelSource, expected: list[list[int]]
) -> None:
    launcher = CommandLauncher("127.0.0.1", [[], []])
    executor = ProcessExecutor(tiny_config(tensor_parallel_size=2), source, launcher)
    assert tokens_of(executor) == expected
    assert [rank.ending(10) for rank in launcher.ranks] == [0, 0]
    assert launcher.is_closed


def test_a_launched_rank_that_is_killed_is_the_engines_death(source: ModelSource) -> None:
    launcher = CommandLauncher("127.0.0.1", [[], []])
    executor = ProcessExecutor(tiny_config(pipeline_parallel_size=2), source, launcher)
    try:
        driver = Driver(executor, executor.start().num_pages, num_stages=2)
        sequence = driver.enter(0, PROMPTS[0], GREEDY, 0)
        driver.generate([sequence], 2)
        launcher.ranks[1].kill()
        began = time.monotonic()
        with pytest.raises(EngineDead, match="rank 1 on host 1 was killed by signal 9"):
            driver.generate([sequence], 10)
        assert time.monotonic() - began < 10
    finally:
        executor.close()
    assert all(rank.ending(10) is not None for rank in launcher.ranks)


def test_a_rank_that_ends_or_does_not_come_is_named(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = CommandLauncher("127.0.0.1", [["env", sys.executable, "-c", "raise SystemExit(3)"]])
    with pytest.raises(EngineDead, match="rank 0 on host 0 ended with code 3 before it had connected"):
        ProcessExecutor(tiny_config(), source, launcher).start()
    monkeypatch.setattr(processes, "_GATHER_S", 0.5)
    launcher = CommandLauncher("127.0.0.1", [["sh", "-c", "sleep 60", "#"]])
    with pytest.raises(EngineDead, match=r"rank 0 on host 0 has not connected to 127.0.0.1 within"):
        ProcessExecutor(tiny_config(), source, launcher).start()
    assert launcher.ranks[0].ending(0) is not None


def test_a_rank_with_another_secret_or_version_is_refused(source: ModelSource, tmp_path: Path) -> None:
    launcher = CommandLauncher("127.0.0.1", [[]], {"OCTAVO_RANK_SECRET": "00" * 32})
    with pytest.raises(EngineDead, match="rank 0 on host 0 ended with code 1 before it had connected"):
        ProcessExecutor(tiny_config(), source, launcher).start()
    older = tmp_path / "sitecustomize.py"
    older.write_text("import octavo\noctavo.__version__ = '0.0.1'\n")
    paths = f"{tmp_path}:{Path(__file__).parents[2]}"
    launcher = CommandLauncher("127.0.0.1", [["env", f"PYTHONPATH={paths}"]])
    with pytest.raises(ConfigError, match=r"rank 0 on host 0 runs octavo 0\.0\.1 .* install the same versions"):
        ProcessExecutor(tiny_config(), source, launcher).start()


@pytest.mark.netns
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_ranks_on_two_hosts_give_one_ranks_tokens(
    source: ModelSource, expected: list[list[int]], sizes: dict[str, int]
) -> None:
    """Two network namespaces: nothing but the bridge joins them, and localhost is another in each."""
    try:
        with two_hosts(f"oct{next(iter(sizes))[0]}") as (host, spaces):
            launcher = CommandLauncher(host, [["ip", "netns", "exec", space] for space in spaces])
            assert tokens_of(ProcessExecutor(tiny_config(**sizes), source, launcher)) == expected
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no network namespaces here: {error}")
