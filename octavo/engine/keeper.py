"""When an engine is to be ended, and whether another is worth starting.
Knows nothing of processes but what the kernel tells of them, and does nothing itself."""

import contextlib
import time
from collections import deque
from pathlib import Path

from octavo.engine.pulse import Pulse

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


class Watch:
    """Looks at a pulse every LOOK_SECONDS. What counts is time in which this process ran too: one that was stopped, or whose
    clock jumped, must not blame the engine."""

    def __init__(self, pulse: Pulse, step_timeout: float) -> None:
        self._pulse = pulse
        self._timeout = step_timeout
        self._looked = time.monotonic()
        self._beat = 0
        self._silent = 0.0  # seconds without a turn of the loop
        self._stalled = 0.0  # of these, the last ones without any computing
        self._computed = -1

    def look(self) -> str | None:
        """What is wrong, in words: the engine is to be killed. None: nothing is."""
        now = time.monotonic()
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        beat = self._pulse.beat
        if beat != self._beat or not beat:  # not beat: it loads, for as long as that takes
            self._beat, self._silent, self._computed = beat, 0.0, -1
            self._set_stalled(0.0)
            return None
        self._silent += elapsed
        if self._silent > 2 * LOOK_SECONDS:
            self._note_computing(elapsed)
        if not self._timeout:
            return None
        if self._stalled > self._timeout / _STALLED_SHARE:
            return f"{self._what()} for {self._silent:.1f} s, and nothing is computed; {self._who()}"
        if self._silent > self._timeout:
            return f"{self._what()} for {self._silent:.1f} s (--step-timeout); {self._who()}"
        return None

    def _note_computing(self, elapsed: float) -> None:
        computed = _computed(self._pulse.pid)
        if computed is None:  # the kernel does not tell
            return
        self._set_stalled(self._stalled + elapsed if computed in (self._computed, _STOPPED) else 0.0)
        self._computed = computed

    def _set_stalled(self, seconds: float) -> None:
        if seconds != self._stalled:
            self._stalled = seconds
            self._pulse.stalled(seconds)

    def _what(self) -> str:
        if self._pulse.is_stepping:
            return f"step {self._pulse.num_steps} has not ended"
        return "the idle engine has not turned"

    def _who(self) -> str:
        names = self._pulse.seated() if self._pulse.is_stepping else []
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
    for member in found:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended
                found += map(int, children.read_text().split())
    return found
