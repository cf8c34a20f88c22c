"""Pace: how long steps kept the host busy, and in sum the device."""

from octavo.observe.metrics.exposition import Histogram
from octavo.observe.step_observer import StepEnd, StepObserver, StepTimes
from octavo.schedule.results import Committed

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


class Pace(StepObserver):
    def __init__(self) -> None:
        self.host = Histogram(HOST_BOUNDS)
        self.busy_seconds = 0.0

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self.busy_seconds += times.compute_seconds

    def stepped(self, end: StepEnd) -> None:
        self.host.observe(end.host_seconds)
