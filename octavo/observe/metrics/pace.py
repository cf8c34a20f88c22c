"""Pace: what a turn of the step loop took of the host, and for how long a step was being computed.
Knows nothing of what a step does; the loop brings the times.

A step is computed from when it was handed over, or the one before it ended, until its result is there. The host sees that moment
exactly where it has to wait for it; where the result was there already, the time counts up to when it was fetched."""

from octavo.observe.metrics.exposition import Histogram

HOST_BOUNDS = (
    0.0001,
    0.00025,
    0.0005,
    0.00075,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.1,
    0.5,
)


class Pace:
    def __init__(self) -> None:
        self.host = Histogram(HOST_BOUNDS)
        self.busy_seconds = 0.0
        self.last_seconds = 0.0  # for which the last step was computed
        self._handed_over: list[float] = []  # of the steps in flight
        self._last_end = 0.0

    def submitted(self, now: float) -> None:
        self._handed_over.append(now)

    def collected(self, now: float) -> None:
        """The oldest step's result is there."""
        start = max(self._handed_over.pop(0), self._last_end)
        self.last_seconds = now - start
        self.busy_seconds += self.last_seconds
        self._last_end = now

    def turned(self, host_seconds: float) -> None:
        """The loop has turned once: planned, handed over, taken in."""
        self.host.observe(host_seconds)
