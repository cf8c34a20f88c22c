"""StepHeartbeat: writes what the step loop does into the heartbeat that the supervisor and the API processes read."""

from collections import deque

from octavo.admission.queue_limit import QueueLimit
from octavo.ipc.heartbeat import NUM_PREPARED, Heartbeat
from octavo.messages import Abort, GenerateRequest
from octavo.observe.step_observer import StepEnd, StepObserver
from octavo.schedule import Scheduler
from octavo.schedule.results import GrammarsReady, Planned, Removed


class StepHeartbeat(StepObserver):
    is_essential = True  # without beats the watchdog would kill the engine as one that hangs

    def __init__(self, heartbeat: Heartbeat, scheduler: Scheduler, queue_limit: QueueLimit) -> None:
        """`queue_limit`: how fast the queue moves. It must hear of a plan before this does."""
        self._heartbeat, self._scheduler, self._rows, self._queue_limit = (
            heartbeat,
            scheduler,
            scheduler.rows,
            queue_limit,
        )
        self._sizes: deque[int] = deque()  # tokens of the steps in flight
        self._preparing: dict[str, int] = {}  # request that waits for its grammar → its place in the heartbeat
        self._places = list(range(1, NUM_PREPARED))  # free ones; 0 is the driver's

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        """Compiling a grammar may end the engine before the request has a row."""
        if awaits_grammar and self._places:
            place = self._preparing[request.id] = self._places.pop()
            self._heartbeat.prepare(place, request.id)

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self._drop_prepared()

    def grammars_ready(self, ready: GrammarsReady, now: float) -> None:
        self._drop_prepared()

    def _drop_prepared(self) -> None:
        if not self._preparing:
            return
        waiting = {request.id for request in self._rows.awaiting_grammar.values()}
        for request_id in [each for each in self._preparing if each not in waiting]:
            place = self._preparing.pop(request_id)
            self._heartbeat.prepare(place, "")
            self._places.append(place)

    def began(self) -> None:
        self._heartbeat.begin()

    def rows_changed(self, planned: Planned, now: float) -> None:
        self._heartbeat.seat(planned.plan.leaves, ((request.row, request.id) for request in planned.admitted))
        if self._preparing:
            self._drop_prepared()
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
