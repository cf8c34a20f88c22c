"""When a hung engine is killed, tested on real processes; and the removal of folders that killed servers left behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.ipc import heartbeat as heartbeat_module
from octavo.ipc.heartbeat import Heartbeat, is_named, shared_memory
from octavo.supervisor import watchdog
from octavo.supervisor.runtime_dir import RuntimeDir, remove_abandoned
from octavo.supervisor.watchdog import MAX_FAILED_STARTS, WINDOW_SECONDS, Restarts, ServerWatch, Watch


class Clock:
    """The clock of the watch: it advances by half a second with every look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def started(code: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `code`, and wait until it runs."""
    process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    return process


def looks(watch: Watch | SimpleNamespace, clock: Clock, seconds: float) -> str | None:
    """The first problem that is reported within this many seconds."""
    for _ in range(int(seconds / watchdog.LOOK_SECONDS)):
        clock.now += watchdog.LOOK_SECONDS
        if (problem := watch.look()) is not None:
            return problem
    return None


def heartbeat_of(pid: int) -> Heartbeat:
    heartbeat = Heartbeat()
    heartbeat.reset()
    heartbeat._words[0] = pid
    heartbeat.begin()
    return heartbeat


def test_a_step_that_computes_nothing_is_found_soon(clock: Clock) -> None:
    process = started("import time; time.sleep(1000)")
    try:
        heartbeat = heartbeat_of(process.pid)
        heartbeat.seat([], [(0, "cmpl-a"), (3, "cmpl-b"), (4, "cmpl-b")])
        watch = Watch(heartbeat, step_timeout=100)
        assert looks(watch, clock, 9) is None and heartbeat.stalled_seconds > 5
        heartbeat.begin()  # a heartbeat: no problem for another ten seconds
        assert looks(watch, clock, 9) is None
        problem = looks(watch, clock, 10)
        assert problem is not None and "step 0 has not ended" in problem and "nothing is computed" in problem
        assert problem.endswith("requests in it: cmpl-a, cmpl-b")
        heartbeat.rest()
        problem = looks(watch, clock, 20)
        assert problem is not None and "the idle engine has sent no heartbeat" in problem
        assert looks(Watch(heartbeat, step_timeout=0), clock, 1000) is None  # a timeout of 0: not watched
    finally:
        process.kill()
        process.wait()


def test_a_slow_step_gets_its_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(watchdog, "_computed", lambda pid: next(ticks))
    watch = Watch(heartbeat_of(os.getpid()), step_timeout=100)
    assert looks(watch, clock, 99) is None
    problem = looks(watch, clock, 5)
    assert problem is not None and "--step-timeout" in problem


def test_what_the_kernel_tells() -> None:
    process = started("while True: pass")
    try:
        first = watchdog._computed(process.pid)
        while watchdog._computed(process.pid) == first:
            pass
        os.kill(process.pid, signal.SIGSTOP)
        while watchdog._computed(process.pid) != watchdog._STOPPED:
            pass
        # One stopped process makes the whole family count as stopped.
        assert watchdog._computed(os.getpid()) == watchdog._STOPPED
    finally:
        process.kill()
        process.wait()
    assert watchdog._computed(process.pid) is None


def test_time_in_which_the_watch_did_not_run_does_not_count(clock: Clock) -> None:
    watch = Watch(heartbeat_of(os.getpid()), step_timeout=100)
    for _ in range(3):
        clock.now += 10_000  # the whole server was stopped, or the machine slept
        assert watch.look() is None


def test_an_engine_that_loads_is_let_be(clock: Clock) -> None:
    heartbeat = Heartbeat()
    heartbeat.reset()
    assert looks(Watch(heartbeat, step_timeout=1), clock, 1000) is None


def test_an_api_process_whose_event_loop_does_not_turn_is_found(clock: Clock) -> None:
    process = started("import time; time.sleep(1000)")
    try:
        heartbeat = Heartbeat()
        watch = ServerWatch(heartbeat, 3, step_timeout=100)

        def look(seconds: float) -> str | None:
            return looks(SimpleNamespace(look=lambda: watch.look(process.pid)), clock, seconds)

        assert look(1000) is None  # it is still loading
        heartbeat.api_beat(3)
        heartbeat.reset()  # a new engine's start does not count as an API process's heartbeat
        assert look(9) is None
        heartbeat.api_beat(3)
        assert look(9) is None
        problem = look(10)
        assert problem is not None and problem.startswith("its event loop has been blocked") and "computed" in problem
        heartbeat.forget(3)
        assert look(1000) is None
    finally:
        process.kill()
        process.wait()


def test_restarts_are_limited_in_number_and_in_a_row() -> None:
    restarts = Restarts(4)
    assert [restarts.delay(now, True) for now in (1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0]
    assert restarts.delay(4.0, True) == 0.0 and restarts.delay(5.0, True) is None
    assert "--max-engine-restarts" in restarts.why_not
    assert restarts.delay(WINDOW_SECONDS + 2.5, True) == 0.0  # two of them are long ago
    restarts = Restarts(100)
    delays = [restarts.delay(1.0, False) for _ in range(MAX_FAILED_STARTS)]
    assert delays == [1.0, 2.0, None] and "in a row" in restarts.why_not
    assert Restarts(0).delay(1.0, True) is None


def test_a_heartbeat_is_shared_by_processes_and_names_the_requests_in_rows() -> None:
    fd = shared_memory()
    heartbeat, other = Heartbeat(fd), Heartbeat(fd)
    os.close(fd)
    long = "cmpl-" + "x" * 100
    heartbeat.seat([], [(0, "a"), (1, long), (5000, "beyond")])
    heartbeat.seat([0], [(0, "b")])
    heartbeat.begin()
    assert other.seated() == ["b", long[:63]] and other.is_stepping and other.beat
    assert is_named(long, other.seated()) and not is_named("a", other.seated())
    heartbeat.end(7, 2, 3)
    assert (other.num_steps, other.num_running, other.num_waiting) == (7, 2, 3)
    heartbeat.reset()
    assert other.seated() == [] and not other.beat
    heartbeat.close(), other.close()


def test_what_is_usual_follows_the_longest_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10**12
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic_ns=lambda: now))
    heartbeat = Heartbeat()

    def step(num_tokens: int, seconds: float) -> None:
        nonlocal now
        heartbeat.size(num_tokens)
        heartbeat.begin()
        now += int(seconds * 1e9)
        heartbeat.end(1, 1, 0)

    assert heartbeat.usual() is None
    step(1, 30.0)  # compiled something
    assert heartbeat.usual() == (30.0, True)
    heartbeat.size(64)
    assert heartbeat.usual() == (30.0 * 64, False)
    for _ in range(300):
        step(1, 0.005)
    assert heartbeat.usual() == (0.1, True)
    step(1000, 8.0)
    for _ in range(300):
        step(1, 0.005)
        step(700, 6.0)
    heartbeat.size(600)
    seconds, is_known = heartbeat.usual() or (0.0, False)
    assert is_known and seconds == pytest.approx(6.0)
    heartbeat.size(100)  # between two that are known
    assert heartbeat.usual() == (pytest.approx(6.0), False)


def test_folders_of_servers_that_were_killed_are_removed_by_the_next(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    in_use = RuntimeDir()
    code = f"import tempfile; tempfile.tempdir = {str(short_path)!r}\n"
    code += "from octavo.supervisor.runtime_dir import RuntimeDir\nfolder = RuntimeDir()\nimport os, signal; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    stranger = short_path / "octavo-of-somebody-else"
    stranger.mkdir()
    assert len(list(short_path.iterdir())) == 3
    remove_abandoned()
    assert set(short_path.iterdir()) == {in_use.path, stranger}
    in_use.close()
    assert list(short_path.iterdir()) == [stranger]
