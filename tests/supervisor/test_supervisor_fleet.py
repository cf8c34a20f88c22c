"""What the supervisor of a fleet decides: shares of the machine, signs of life, suspects, how many replicas."""

import os
import signal
import subprocess
import time

import pytest

from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.ipc import subprocesses
from octavo.ipc.heartbeat import Heartbeat, shared_memory
from octavo.supervisor import launcher, shares, watchdog
from octavo.supervisor.autoscale import DOWN_SECONDS, UP_SECONDS, Autoscale
from octavo.supervisor.launcher import LineReader, LocalEngine
from octavo.supervisor.shares import gpus, share_of
from octavo.supervisor.watchdog import LOOK_SECONDS, CommonRequests, PulseWatch


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(shares, "usable_cores", lambda: 8)


def test_cores_are_divided_without_overlap(many_cores):
    found = [share_of(Config(), number, 3, [], list(range(8))) for number in range(3)]
    assert [share.cores for share in found] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert [share.words for share in found] == ["cores 0-1", "cores 2-4", "cores 5-7"]
    assert all(share.config.parallel.cpu_threads == 2 for share in found)
    added = share_of(Config(), 4, 3, [], list(range(8)))
    assert added.cores == [2, 3, 4] and "shared" in added.words


def test_more_replicas_than_cores_share_them(monkeypatch):
    monkeypatch.setattr(shares, "usable_cores", lambda: 2)
    found = [share_of(Config(), number, 3, [], [4, 9]) for number in range(3)]
    assert [share.cores for share in found] == [[4], [9], [4]]
    assert all(share.config.parallel.cpu_threads == 1 and "shared" in share.words for share in found)


def test_a_quota_divides_threads_and_ties_none_to_a_core(monkeypatch):
    monkeypatch.setattr(shares, "usable_cores", lambda: 4)
    share = share_of(Config(), 1, 2, [], list(range(64)))
    assert share.cores == [] and share.config.parallel.cpu_threads == 2 and share.words == "2 of 4 cores"
    given = share_of(replace(Config(), cpu_threads=7), 1, 2, [], list(range(64)))
    assert given.config.parallel.cpu_threads == 7


def test_gpus_are_divided_or_shared():
    names = ["0", "1", "2", "3"]
    two = replace(Config(), tensor_parallel_size=2)
    assert [share_of(two, n, 2, names, []).environment["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["0,1", "2,3"]
    alone = share_of(Config(), 1, 2, names, [])
    assert alone.environment == {"CUDA_VISIBLE_DEVICES": "1"} and alone.config.cache.gpu_memory_utilization == 0.92
    shared = [share_of(Config(), number, 3, ["7", "8"], []) for number in range(3)]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in shared] == ["7", "8", "7"]
    assert [each.config.cache.gpu_memory_utilization for each in shared] == [0.46, 0.92, 0.46]
    with pytest.raises(ConfigError, match="needs 6 GPUs; there are 4"):
        share_of(two, 0, 3, names, [])
    with pytest.raises(ConfigError, match="has 2 ranks and needs 2 GPUs; there are 1"):
        share_of(two, 0, 1, ["0"], [])
    assert share_of(replace(Config(), device="cpu"), 0, 2, names, [0, 1]).environment == {}


def test_gpus_are_those_that_are_visible(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus({}, tmp_path) == ["0", "2", "10"]
    assert gpus({"CUDA_VISIBLE_DEVICES": " 3, GPU-ab "}, tmp_path) == ["3", "GPU-ab"]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == [] == gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)


def test_a_replica_without_a_pulse_is_noticed_however_long_its_step_is(monkeypatch):
    clock, heartbeat = Clock(monkeypatch), Heartbeat()
    watch = PulseWatch(heartbeat, 3.0)
    for _ in range(20):  # it loads: no pulse yet
        clock.now += LOOK_SECONDS
        assert watch.look() is None
    heartbeat.begin()  # one step, which never ends
    for _ in range(20):
        heartbeat.pulse()
        clock.now += LOOK_SECONDS
        assert watch.look() is None
    seen = []
    for _ in range(8):
        clock.now += LOOK_SECONDS
        seen.append(watch.look())
    assert seen[:6] == [None] * 6 and "no sign of life for 3.5 s (--replica-timeout)" in str(seen[6])
    heartbeat.pulse()
    assert watch.look() is None


def test_time_in_which_the_supervisor_itself_stood_still_does_not_count(monkeypatch):
    clock, heartbeat = Clock(monkeypatch), Heartbeat()
    watch = PulseWatch(heartbeat, 3.0)
    heartbeat.pulse()
    assert watch.look() is None
    clock.now += 3600  # the whole machine was suspended
    assert watch.look() is None
    off = PulseWatch(heartbeat, 0.0)
    for _ in range(100):
        clock.now += LOOK_SECONDS
        assert off.look() is None


def test_the_blocks_of_replicas_do_not_overlap():
    fd = shared_memory(3)
    try:
        blocks = [Heartbeat(fd, number) for number in range(3)]
        for number, block in enumerate(blocks):
            block.reset()
            block.seat([], [(4095, f"request {number}")])
            block.count_refusal(1023, "forbidden", "content_type")
            block.set_backlog(number)
        assert [block.seated() for block in blocks] == [[f"request {number}"] for number in range(3)]
        assert [block.backlog_seconds for block in blocks] == [0, 1, 2]
        assert Heartbeat(fd, 1).refusals()["forbidden", "content_type"] == 1
    finally:
        os.close(fd)


def test_requests_that_were_in_two_replicas_are_suspects_for_a_while():
    common = CommonRequests(60.0)
    assert common.note(["a", "b"], 0.0) == []
    assert common.note(["b", "c"], 50.0) == ["b"]
    assert common.note(["a", "c"], 70.0) == ["c"]
    assert common.note(["a", "b", "c"], 1000.0) == []


def test_lines_are_read_as_they_come():
    reading, writing = os.pipe()
    try:
        lines = LineReader(reading)
        assert lines.read() == []
        os.write(writing, b"one\ntwo\nthr")
        assert lines.read() == [b"one", b"two"] and lines.read() == []
        os.write(writing, b"ee\n")
        assert lines.read() == [b"three"]
        os.close(writing)
        assert lines.read() is None
    finally:
        os.close(reading)


def run(autoscale: Autoscale, target: int, backlog: float, seconds: float, start: float = 0.0) -> list[int]:
    """The targets while all replicas are ready, and `backlog` seconds of work wait at each."""
    found, now = [], start
    while now <= start + seconds:
        target = autoscale.target(now, target, [backlog] * target)
        found.append(target)
        now += 0.5
    return found


def test_replicas_are_added_when_work_waits_and_removed_when_it_does_not():
    autoscale = Autoscale(1, 4, 2.0)
    assert run(autoscale, 1, 10.0, UP_SECONDS - 0.5) == [1] * 6
    assert run(autoscale, 1, 10.0, 0.0, UP_SECONDS) == [2]
    assert max(run(autoscale, 2, 100.0, 60.0, 10.0)) == 4  # never more
    assert run(Autoscale(1, 4, 2.0), 3, 0.0, DOWN_SECONDS - 0.5)[-1] == 3
    assert run(Autoscale(1, 4, 2.0), 3, 0.0, 5 * DOWN_SECONDS)[-1] == 1
    assert run(Autoscale(2, 4, 2.0), 3, 0.0, 5 * DOWN_SECONDS)[-1] == 2  # never fewer


def test_nothing_is_decided_while_replicas_start_or_for_a_short_burst():
    autoscale = Autoscale(1, 4, 2.0)
    assert [autoscale.target(now, 2, [50.0]) for now in range(20)] == [2] * 20
    burst = [autoscale.target(now / 2, 2, [50.0 if now % 4 else 0.0] * 2) for now in range(40)]
    assert burst == [2] * 40
    moderate = run(Autoscale(1, 4, 2.0), 2, 1.0, 5 * DOWN_SECONDS)  # neither saturated, nor would one carry it
    assert set(moderate) == {2}


def test_flags_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="--max-replicas 2 is below --data-parallel-size 3"):
        replace(Config(), data_parallel_size=3, max_replicas=2)
    with pytest.raises(ConfigError, match="--min-replicas needs --max-replicas"):
        replace(Config(), min_replicas=2)
    assert not Config().fleet.is_fleet and replace(Config(), max_replicas=2).fleet.is_fleet


def test_a_killed_engine_that_does_not_end_is_left_behind(monkeypatch):
    """As one that waits for a disk that does not answer: here, one that the signal does not reach."""
    monkeypatch.setattr(launcher, "KILLED_SECONDS", 0.2)
    monkeypatch.setattr(subprocesses, "KILLED_SECONDS", 0.2)
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        monkeypatch.setattr(process, "send_signal", lambda number: None)
        engine = LocalEngine(process)
        assert not engine.give_up_if_unkillable() and engine.poll() is None
        engine.kill()
        assert not engine.give_up_if_unkillable(), "it may still end"
        time.sleep(0.25)
        assert engine.give_up_if_unkillable() and engine.poll() == -signal.SIGKILL
        engine = LocalEngine(process)
        engine.kill()
        started = time.monotonic()
        assert engine.wait() == -signal.SIGKILL and engine.is_left_behind
        assert 0.2 <= time.monotonic() - started < 30
        monkeypatch.undo()
        engine = LocalEngine(process)
        engine.kill()
        assert engine.wait() == -signal.SIGKILL and not engine.is_left_behind and not engine.give_up_if_unkillable()
