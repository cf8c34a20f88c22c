"""StepHeartbeat: writes what the step loop does into the heartbeat that the supervisor and the API processes read."""

from collections import deque

from octavo.admission.queue_limit import QueueLimit
from octavo.ipc.heartbeat import Heartbeat
from octavo.observe.step_observer import StepEnd, StepObserver
from octavo.schedule import Scheduler
from octavo.schedule.results import Planned


class StepHeartbeat(StepObserver):
    def __init__(self, heartbeat: Heartbeat, scheduler: Scheduler, queue_limit: QueueLimit) -> None:
        """`queue_limit`: how fast the queue moves. It must hear of a plan before this does."""
        self._heartbeat, self._scheduler, self._rows, self._queue_limit = (
            heartbeat,
            scheduler,
            scheduler.rows,
            queue_limit,
        )
        self._sizes: deque[int] = deque()  # tokens of the steps in flight

    def began(self) -> None:
        self._heartbeat.begin()

    def rows_changed(self, planned: Planned, now: float) -> None:
        self._heartbeat.seat(planned.plan.leaves, ((request.row, request.id) for request in planned.admitted))
        if planned.admitted:
            self._heartbeat.move(self._queue_limit.seconds_for(1, now))

    def planned(self, planned: Planned, now: float) -> None:
        if not planned.is_empty:
            self._sizes.append(planned.num_tokens)
            self._heartbeat.size(sum(self._sizes))  # steps that overlap are waited for together

    def stepped(self, end: StepEnd) -> None:
        while len(self._sizes) > end.num_in_flight:
            self._sizes.popleft()
        self._heartbeat.end(self._scheduler.num_steps, len(self._rows.running), self._rows.num_waiting)
