"""Autoscale: how many replicas there should be, by the seconds of work that wait at each. Pure: it is given times and numbers."""

from collections.abc import Sequence

UP_SECONDS = 3.0
"""A replica is added when replicas have been saturated for this long on average: a short burst is served sooner than one starts."""
DOWN_SECONDS = 60.0
"""A replica is removed when one fewer would have been idle enough for this long: starting it again costs more than keeping it a while."""
IDLE_SHARE = 0.25
"""Share of the saturation that the rest may have to carry after one is removed."""


class Autoscale:
    def __init__(self, least: int, most: int, saturation: float) -> None:
        """`saturation`: seconds of waiting work from which on a replica is saturated."""
        self.least, self.most = least, most
        self._saturation = saturation
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    def target(self, now: float, target: int, backlogs: Sequence[float]) -> int:
        """The new target. `backlogs`: seconds of work that wait at each replica that takes requests. While replicas start or drain, there are
        more or fewer of them than the target, and nothing is decided."""
        if len(backlogs) != target or not backlogs:
            self._busy_since = self._idle_since = None
            return min(max(target, self.least), self.most)
        total = sum(backlogs)
        is_busy = total / len(backlogs) > self._saturation
        is_idle = len(backlogs) > 1 and total / (len(backlogs) - 1) < IDLE_SHARE * self._saturation
        self._busy_since = (self._busy_since if self._busy_since is not None else now) if is_busy else None
        self._idle_since = (self._idle_since if self._idle_since is not None else now) if is_idle else None
        if self._busy_since is not None and now - self._busy_since >= UP_SECONDS and target < self.most:
            self._busy_since = None
            # As many as the work would saturate, at most twice as many as there are.
            return min(self.most, max(target + 1, min(2 * target, int(total / self._saturation))))
        if self._idle_since is not None and now - self._idle_since >= DOWN_SECONDS and target > self.least:
            self._idle_since = now
            return target - 1
        return target
