"""StepHeartbeat: writes what the step loop does into the heartbeat that the supervisor and the API processes read."""

from collections import deque

from octavo.admission.queue_limit import QueueLimit
from octavo.ipc.heartbeat import Heartbeat
from octavo.observe.step_observer import StepEnd, StepObserver, StepTimes
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed, Planned


class StepHeartbeat(StepObserver):
    def __init__(self, heartbeat: Heartbeat, scheduler: Scheduler, queue_limit: QueueLimit) -> None:
        """`queue_limit`: how fast the queue moves. It must hear of a plan before this does."""
        self._heartbeat, self._scheduler, self._queue_limit = heartbeat, scheduler, queue_limit
        self._sizes: deque[int] = deque()  # tokens of the steps in flight

    def began(self) -> None:
        self._heartbeat.begin()

    def planned(self, planned: Planned, now: float) -> None:
        leaves, admitted = planned.plan.leaves, planned.admitted
        if leaves or admitted:
            self._heartbeat.seat(leaves, ((request.row, request.id) for request in admitted))
        if admitted:
            self._heartbeat.move(self._queue_limit.seconds_for(1, now))
        if not planned.is_empty:
            self._sizes.append(planned.num_tokens)
            self._heartbeat.size(sum(self._sizes))  # steps that overlap are waited for together

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._sizes.popleft()

    def stepped(self, end: StepEnd) -> None:
        scheduler = self._scheduler
        self._heartbeat.end(scheduler.num_steps, len(scheduler.running), scheduler.num_waiting)
