"""The step loop: plan → submit → collect → commit. The thirty lines to read first.
Knows nothing of sockets, processes or text; whoever drives it calls step() while there is work."""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.engine.progress import progress_of
from octavo.engine.pulse import Pulse
from octavo.executor.base import Executor
from octavo.messages import (
    Abort,
    Control,
    GenerateRequest,
    Ping,
    ReadMetrics,
    ReadProgress,
    ResetPrefixCache,
    StepPlan,
    TokenDelta,
)
from octavo.observe.metrics import EngineMetrics, EngineState
from octavo.schedule import Scheduler


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
        pulse: Pulse | None = None,
    ) -> None:
        """`pulse`: where to tell others that the loop turns. None: nobody wants to know."""
        self.scheduler, self.executor, self.metrics, self._clock = scheduler, executor, metrics, clock
        self.pulse = Pulse() if pulse is None else pulse
        self._in_flight: deque[StepPlan] = deque()
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or not self.scheduler.is_idle

    def step(self) -> list[TokenDelta]:
        """One turn: make and submit a plan, then take in what is due. Returns the tokens that became known."""
        self.pulse.begin()
        plan = self.scheduler.plan()
        if not plan.is_empty:
            self._note_plan(plan)
            self.executor.submit(plan)
            self._in_flight.append(plan)
        deltas: list[TokenDelta] = []
        depth = 1 if self.executor.overlap else 0  # plans that may be in flight while the next is made
        while len(self._in_flight) > depth or (self._in_flight and plan.is_empty):
            result = self.executor.collect()
            done = self._in_flight.popleft()
            committed = self.scheduler.commit(done, result)
            self.metrics.step(self._clock(), sum(done.counts), committed)
            deltas += committed
        self.pulse.end(self.scheduler.num_steps, len(self.scheduler.running), len(self.scheduler.waiting))
        return deltas

    def add(self, request: GenerateRequest) -> None:
        self.scheduler.add(request)
        self.metrics.arrived(request, self._clock())

    def abort(self, abort: Abort) -> None:
        if self.scheduler.abort(abort.request_id, abort.index):
            self.metrics.aborted(abort.request_id, abort.index, abort.reason, self._clock())

    def control(self, control: Control) -> str:
        """Every verb that is not a request, in one place. Called between two steps."""
        match control:
            case ReadMetrics():
                return self.metrics.text(self.state())
            case ReadProgress():
                return msgspec.json.encode(progress_of(self.scheduler, self.metrics, self._clock())).decode()
            case Ping():
                return "pong"
            case ResetPrefixCache():
                return str(self.scheduler.cache.reset_prefixes())

    def state(self) -> EngineState:
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        waiting = len(scheduler.waiting)
        reasons: dict[str, int] = dict.fromkeys(("rows", "pages", "budget", "order"), 0)
        if waiting:
            reasons[scheduler.head_waits_for or "order"] += 1
            reasons["order"] += waiting - 1
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=waiting,
            waiting_by_reason=reasons,
            num_used_pages=pool.num_used,
            num_cached_pages=len(pool.cached),
            num_free_pages=len(pool.blank),
            num_filled_slots=scheduler.slot_use()[0],
            num_host_pages_used=scheduler.cache.num_host_used,
        )

    def close(self) -> None:
        self.executor.close()

    def _note_plan(self, plan: StepPlan) -> None:
        if plan.leaves or self.scheduler.admitted:
            self.pulse.seat(plan.leaves, ((request.row, request.id) for request in self.scheduler.admitted))
        if self.scheduler.admitted:
            now = self._clock()
            for request in self.scheduler.admitted:
                self.metrics.admitted(request.id, now, request.num_cached)
        preemptions = self.scheduler.num_preemptions
        if preemptions != self._num_preemptions:
            self.metrics.preempted(preemptions - self._num_preemptions)
            self._num_preemptions = preemptions
