"""Decides when a hung engine or API process must be killed, and whether to start another. The supervisor acts on it."""

import contextlib
import time
from collections import deque
from pathlib import Path

from octavo.ipc.heartbeat import Heartbeat

LOOK_SECONDS = 0.5
WINDOW_SECONDS = 600.0
MAX_FAILED_STARTS = 3
"""Consecutive failed starts after which the supervisor gives up: more attempts would fail the same way."""
_STALLED_SHARE = 10
"""A process that uses no CPU time is given a tenth of --step-timeout."""
_NAMES = 8  # requests named in one message
_REQUESTS = "; requests in it: "


class Restarts:
    """Limits restarts to `limit` in ten minutes. Each failed start delays the next attempt by one more second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()
        self._num_failed = 0

    def delay(self, now: float, was_ready: bool) -> float | None:
        """Seconds to wait before the next start. None: do not start another."""
        self._num_failed = 0 if was_ready else self._num_failed + 1
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._limit or self._num_failed >= MAX_FAILED_STARTS:
            return None
        self._times.append(now)
        return float(self._num_failed)  # the old process's resources, such as GPU memory, may take a moment to be freed

    @property
    def why_not(self) -> str:
        if self._limit == 0:
            return "--max-engine-restarts is 0"
        if self._num_failed >= MAX_FAILED_STARTS:
            return f"{self._num_failed} starts in a row have failed"
        return f"it was restarted {self._limit} times in {WINDOW_SECONDS / 60:.0f} minutes (--max-engine-restarts)"


class Silence:
    """Measures how long a process has not sent a heartbeat, and how long it has used no CPU time meanwhile. Only time in which
    the supervisor itself ran counts: if the supervisor was stopped or its clock jumped, the other process is not to blame."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._beat = 0
        self.seconds = 0.0
        self.stalled = 0.0  # seconds without CPU time, up to now
        self._computed = -1

    def look(self, beat: int, pid: int) -> None:
        """Update the durations; to be called every LOOK_SECONDS. `beat`: time of the last heartbeat; 0: the process is still
        loading, which this does not limit."""
        now = time.monotonic()
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        if beat != self._beat or not beat:
            self._beat, self.seconds, self.stalled, self._computed = beat, 0.0, 0.0, -1
            return
        self.seconds += elapsed
        if self.seconds <= 2 * LOOK_SECONDS:
            return
        computed = _computed(pid)
        if computed is not None:  # None: the kernel does not report it
            self.stalled = self.stalled + elapsed if computed in (self._computed, _STOPPED) else 0.0
            self._computed = computed

    def problem(self, what: str, timeout: float) -> str | None:
        """Describe the problem if `what` has lasted too long, else None. `timeout` 0: no limit."""
        if not timeout:
            return None
        if self.stalled > timeout / _STALLED_SHARE:
            return f"{what} for {self.seconds:.1f} s, and nothing is computed"
        if self.seconds > timeout:
            return f"{what} for {self.seconds:.1f} s (--step-timeout)"
        return None


class ServerWatch:
    """Checks an API process's heartbeat every LOOK_SECONDS."""

    def __init__(self, heartbeat: Heartbeat, origin: int, step_timeout: float) -> None:
        self._heartbeat, self._origin, self._timeout = heartbeat, origin, step_timeout
        self._silence = Silence()

    def look(self, pid: int) -> str | None:
        """Return the problem for which the process must be killed, or None."""
        self._silence.look(self._heartbeat.beat_of(self._origin), pid)
        return self._silence.problem("its event loop has been blocked", self._timeout)


class Watch:
    """Checks an engine's heartbeat every LOOK_SECONDS."""

    def __init__(self, heartbeat: Heartbeat, step_timeout: float) -> None:
        self._heartbeat, self._timeout = heartbeat, step_timeout
        self._silence = Silence()

    def look(self) -> str | None:
        """Return the problem for which the engine must be killed, or None."""
        silence, before = self._silence, self._silence.stalled
        silence.look(self._heartbeat.beat, self._heartbeat.pid)
        if silence.stalled != before:
            self._heartbeat.stalled(silence.stalled)
        problem = silence.problem(self._what(), self._timeout)
        return None if problem is None else f"{problem}{_REQUESTS}{self._requests()}"

    def _what(self) -> str:
        if self._heartbeat.is_stepping:
            return f"step {self._heartbeat.num_steps} has not ended"
        return "the idle engine has sent no heartbeat"

    def _requests(self) -> str:
        names = self._heartbeat.seated() if self._heartbeat.is_stepping else []
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        return f"{', '.join(names[:_NAMES]) or 'none'}{more}"


class PulseWatch:
    """Checks every LOOK_SECONDS that a replica's process sends its pulse. The thread that sends it does nothing else, so neither a long
    step nor a full queue delays it. As for Silence, only time in which the supervisor itself ran counts."""

    def __init__(self, heartbeat: Heartbeat, timeout: float) -> None:
        self._heartbeat, self._timeout = heartbeat, timeout
        self._looked = time.monotonic()
        self._pulse = 0
        self._seconds = 0.0

    def look(self) -> str | None:
        """Return the problem for which the replica must be replaced, or None."""
        now, pulse = time.monotonic(), self._heartbeat.last_pulse
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        if pulse != self._pulse or not pulse:
            self._pulse, self._seconds = pulse, 0.0
            return None
        self._seconds += elapsed
        if not self._timeout or self._seconds <= self._timeout:
            return None
        return f"its process has given no sign of life for {self._seconds:.1f} s (--replica-timeout)"


class CommonRequests:
    """Finds the requests that were in several replicas when these ended: one of them may be the cause."""

    def __init__(self, seconds: float = 60.0) -> None:
        """`seconds`: how long the end of a replica is remembered."""
        self._seconds = seconds
        self._seen: dict[str, float] = {}  # request → when a replica ended with it

    def note(self, seated: list[str], now: float) -> list[str]:
        """A replica has ended with these. Returns those of them that were in another one, too."""
        self._seen = {name: when for name, when in self._seen.items() if now - when < self._seconds}
        common = [name for name in seated if name in self._seen]
        self._seen.update(dict.fromkeys(seated, now))
        return common


def for_clients(problem: str) -> str:
    """The problem without the requests: clients with one API key must not learn the ids of another's."""
    return problem.partition(_REQUESTS)[0]


_STOPPED = -2


def _computed(pid: int) -> int | None:
    """Clock ticks of CPU time used by a process and its descendants. _STOPPED: a signal has stopped one of them. None: the kernel
    does not report it."""
    ticks = 0
    try:
        for each in _process_tree(pid):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "T":
                return _STOPPED
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):  # no /proc, or a process has just ended
        return None
    return ticks


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended
                found += map(int, children.read_text().split())
    return found
