"""When an engine or an API process is to be ended, and whether another is worth starting.
Knows nothing of processes but what the kernel tells of them, and does nothing itself."""

import contextlib
import time
from collections import deque
from pathlib import Path

from octavo.ipc.heartbeat import Heartbeat

LOOK_SECONDS = 0.5
WINDOW_SECONDS = 600.0
MAX_FAILED_STARTS = 3
"""In a row. An engine that has served and does not come up any more will not for trying again and again."""
_STALLED_SHARE = 10
"""A step that computes nothing gets a tenth of the time that a slow one gets."""
_NAMES = 8  # requests named in one message


class Restarts:
    """At most so many new engines in ten minutes; each failed start waits longer than the last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()
        self._num_failed = 0

    def delay(self, now: float, was_ready: bool) -> float | None:
        """Seconds to wait before the next start. None: there shall be no other."""
        self._num_failed = 0 if was_ready else self._num_failed + 1
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._limit or self._num_failed >= MAX_FAILED_STARTS:
            return None
        self._times.append(now)
        return float(self._num_failed)  # what the old one held, a GPU's memory say, may take a moment to be free

    @property
    def why_not(self) -> str:
        if self._limit == 0:
            return "--max-engine-restarts is 0"
        if self._num_failed >= MAX_FAILED_STARTS:
            return f"{self._num_failed} starts in a row have failed"
        return f"it was started again {self._limit} times in {WINDOW_SECONDS / 60:.0f} minutes (--max-engine-restarts)"


class Silence:
    """For how long a process has given no sign of life, and for how long it has computed nothing meanwhile. What counts is time in
    which this process ran too: one that was stopped, or whose clock jumped, must not blame another."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._beat = 0
        self.seconds = 0.0
        self.stalled = 0.0  # of these, the last ones without any computing
        self._computed = -1

    def look(self, beat: int, pid: int) -> None:
        """Every LOOK_SECONDS. `beat`: its last sign; 0: it loads, for as long as that takes."""
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
        if computed is not None:  # else the kernel does not tell
            self.stalled = self.stalled + elapsed if computed in (self._computed, _STOPPED) else 0.0
            self._computed = computed

    def problem(self, what: str, timeout: float) -> str | None:
        """In words, where `what` has lasted for too long. `timeout` 0: nothing does."""
        if not timeout:
            return None
        if self.stalled > timeout / _STALLED_SHARE:
            return f"{what} for {self.seconds:.1f} s, and nothing is computed"
        if self.seconds > timeout:
            return f"{what} for {self.seconds:.1f} s (--step-timeout)"
        return None


class ServerWatch:
    """Looks at an API process every LOOK_SECONDS."""

    def __init__(self, heartbeat: Heartbeat, origin: int, step_timeout: float) -> None:
        self._heartbeat, self._origin, self._timeout = heartbeat, origin, step_timeout
        self._silence = Silence()

    def look(self, pid: int) -> str | None:
        """What is wrong, in words: the process is to be killed. None: nothing is."""
        self._silence.look(self._heartbeat.beat_of(self._origin), pid)
        return self._silence.problem("its event loop has not turned", self._timeout)


class Watch:
    """Looks at an engine's pulse every LOOK_SECONDS."""

    def __init__(self, heartbeat: Heartbeat, step_timeout: float) -> None:
        self._heartbeat, self._timeout = heartbeat, step_timeout
        self._silence = Silence()

    def look(self) -> str | None:
        """What is wrong, in words: the engine is to be killed. None: nothing is."""
        silence, before = self._silence, self._silence.stalled
        silence.look(self._heartbeat.beat, self._heartbeat.pid)
        if silence.stalled != before:
            self._heartbeat.stalled(silence.stalled)
        problem = silence.problem(self._what(), self._timeout)
        return None if problem is None else f"{problem}; {self._who()}"

    def _what(self) -> str:
        if self._heartbeat.is_stepping:
            return f"step {self._heartbeat.num_steps} has not ended"
        return "the idle engine has not turned"

    def _who(self) -> str:
        names = self._heartbeat.seated() if self._heartbeat.is_stepping else []
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        return f"requests in it: {', '.join(names[:_NAMES]) or 'none'}{more}"


_STOPPED = -2


def _computed(pid: int) -> int | None:
    """Ticks of processor time that a process and its children have used. _STOPPED: one of them was stopped by a signal. None:
    the kernel does not say."""
    ticks = 0
    try:
        for each in _family(pid):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "T":
                return _STOPPED
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):  # no /proc, or one of them ends just now
        return None
    return ticks


def _family(pid: int) -> list[int]:
    found = [pid]
    for slot in found:
        for children in Path(f"/proc/{slot}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended
                found += map(int, children.read_text().split())
    return found
