"""The step loop: plan → submit → collect → commit. The thirty lines to read first.
Knows nothing of sockets, processes or text; whoever drives it calls step() while there is work."""

import functools
import logging
import queue
import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import audit
from octavo.engine.live_view import Endings, look, page_owners
from octavo.engine.progress import progress_of
from octavo.errors import Overloaded
from octavo.executor.base import Executor
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.memory_trim import trim_heap
from octavo.messages import (
    Abort,
    Answered,
    Control,
    GenerateRequest,
    Ping,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadProgress,
    ResetPrefixCache,
    StepPlan,
    TokenDelta,
)
from octavo.observe.history import History
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.journeys.journey import MAX_RING_BYTES, JourneyRing, tell_journeys
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.metrics.gauges import EngineState
from octavo.recording.recorder import Done, Recorder
from octavo.schedule import Scheduler
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.results import Committed, Planned

log = logging.getLogger("octavo.engine")


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
        heartbeat: Heartbeat | None = None,
        queue_limit: QueueLimit | None = None,
        max_ring_bytes: int = MAX_RING_BYTES,
    ) -> None:
        """`heartbeat`: where to tell others that the loop turns. None: nobody wants to know. `queue_limit`: None: any number may wait."""
        self.scheduler, self.executor, self.metrics, self._clock = scheduler, executor, metrics, clock
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.queue_limit = QueueLimit() if queue_limit is None else queue_limit
        self.journal = EngineJournal()
        self._ring = JourneyRing(max_ring_bytes)
        self._endings = Endings()
        self._history = History()
        self.on_prepared: Callable[[], None] = lambda: None  # called by any thread: there is work again
        self._prepared: queue.SimpleQueue[str] = queue.SimpleQueue()  # grammars that are ready, and not known to be
        self.audits = {"right": 0, "wrong": 0}
        self.page_problems: list[str] = []  # what the last look at the pages' books found
        self._num_audited = 0  # steps before the last look at the pages' books
        self._num_given = 0  # … and before memory was given back
        self._in_flight: deque[StepPlan] = deque()
        self._sizes: deque[int] = deque()  # their tokens
        self._last_plan: StepPlan | None = None
        self._recorder: Recorder | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work or not self._prepared.empty()

    def step(self) -> list[TokenDelta]:
        """One turn: make and submit a plan, then take in what is due. Returns the tokens that became known. Where all that there
        is are requests whose grammars are not ready, it waits for one."""
        if self.scheduler.awaiting_grammar or not self._prepared.empty():
            self._take_prepared()
        self.heartbeat.begin()
        clock, pace = self._clock, self.metrics.pace
        started = clock()
        decided = self.scheduler.plan()
        plan = decided.plan
        planned = clock()
        self._note_plan(decided, planned)
        if not plan.is_empty:
            self._sizes.append(decided.num_tokens)
            self.heartbeat.size(sum(self._sizes))  # what overlaps is waited for together
            pace.submitted(planned)
            self.executor.submit(plan)
            self._in_flight.append(plan)
            self._last_plan = plan
        recorder = self._recorder
        told: list[Done] = []
        # Plans that may be in flight while the next is made. A recorder that wants the state wants it between two steps.
        depth = 1 if self.executor.overlap and not (recorder is not None and recorder.is_due) else 0
        # Where nothing overlaps, handing a step over is computing it.
        host_seconds = (clock() if depth else planned) - started
        deltas: list[TokenDelta] = []
        now = planned
        while len(self._in_flight) > depth or (self._in_flight and plan.is_empty):
            result = self.executor.collect()
            collected = clock()
            pace.collected(collected)
            committed = self.scheduler.commit(self._in_flight.popleft(), result)
            self._sizes.popleft()
            if recorder is not None:
                told.append((committed, pace.last_seconds))
            now = clock()
            self._note_commit(committed, now)
            host_seconds += now - collected
            deltas += committed.deltas
        if recorder is not None:
            recorder.turned(self.scheduler, plan, told, self._in_flight, now)
        pace.turned(host_seconds)
        self.heartbeat.end(self.scheduler.num_steps, len(self.scheduler.running), self.scheduler.num_waiting)
        return deltas

    def record(self, recorder: Recorder) -> None:
        """From now on it hears all that the scheduler is told."""
        self._recorder = recorder
        recorder.take(self.scheduler)

    def add(self, request: GenerateRequest) -> None:
        added = self.scheduler.add(request)
        now = self._clock()
        if self._recorder is not None:
            self._recorder.arrived(request, now)
        self.metrics.arrived(request, now)
        self.journal.queued(request, now, added.awaits_grammar)
        self._start(added.jobs)

    def check(self, request: GenerateRequest) -> None:
        """Raises Overloaded where the queue takes no more, or the request wanted to wait no longer than until now."""
        if request.queue_until and self._clock() >= request.queue_until and not any(request.begun):
            raise self.overdue()
        if not request.begun:
            self.queue_limit.check(request, self.scheduler, self._clock())

    def overdue(self) -> Overloaded:
        """What becomes of a request that waited for its max_queue_ms."""
        self.queue_limit.rejections["queue_time"] += 1
        waiting = self.scheduler.num_waiting
        message = f"no row was free within the request's max_queue_ms; {waiting} requests wait"
        return Overloaded(message, self.queue_limit.retry_after(waiting, self._clock()))

    def abort(self, abort: Abort) -> None:
        removed = self.scheduler.abort(abort.request_id, abort.index)
        if removed is not None:
            now = self._clock()
            if self._recorder is not None:
                self._recorder.aborted(abort, now)
            self.metrics.aborted(abort.request_id, abort.index, abort.reason, now)
            self.journal.returned(removed.returned, now)
            reasons = {(request.id, request.index): abort.reason for request in removed.ended}
            self.journal.ended(removed.ended, reasons, now)
            self.journal.readied(removed.let_in, now)
            self._start(removed.jobs)

    def rest(self) -> None:
        """Nothing has come for a while: time to look at the pages' books and to give memory back, if anything was computed since
        the last time."""
        self._audit()
        if not self.has_work and self._num_given != self.scheduler.num_steps:
            self._num_given = self.scheduler.num_steps
            trim_heap()

    def _audit(self) -> None:
        if self.has_work or self._num_audited == self.scheduler.num_steps:
            return
        self._num_audited = self.scheduler.num_steps
        self.page_problems = audit(self.scheduler.cache, self.scheduler.is_idle)
        self.audits["wrong" if self.page_problems else "right"] += 1
        for problem in self.page_problems:
            log.error("pages are not conserved: %s", problem)

    def answered(self, answered: Answered) -> None:
        """An API process is done with an HTTP request: what became of it is kept here, where every one can ask for it."""
        if not answered.is_old:
            self.metrics.answered(answered)
        self._endings.answered(answered)
        if answered.journey:
            self._ring.keep(answered.ids, answered.journey, answered.at, answered.is_old)

    def control(self, control: Control) -> str:
        """Every verb that is not a request, in one place. Called between two steps."""
        match control:
            case ReadMetrics():
                self._audit()
                return self.metrics.text(self.state())
            case ReadProgress():
                told = progress_of(self.scheduler, self.metrics, self._clock())
                told = msgspec.structs.replace(told, page_problems=self.page_problems)
                return msgspec.json.encode(told).decode()
            case ReadPlace():
                return self._place(control.request_id)
            case Ping():
                return "pong"
            case ReadJourneys():
                live = self.journal.live(self.scheduler.requests(), self._clock(), control.request_id)
                return tell_journeys(live, self._ring, control)
            case ReadLive():
                ended = self._endings.since(control.since)
                state = look(
                    self.scheduler,
                    self.metrics,
                    self._last_plan,
                    ended,
                    self._history,
                    self._clock(),
                    control.since < 0,
                )
                return msgspec.json.encode(state).decode()
            case ReadPage():
                return msgspec.json.encode(page_owners(self.scheduler, self.metrics, control.page)).decode()
            case ResetPrefixCache():
                if self._recorder is not None:
                    self._recorder.forgotten()
                return str(self.scheduler.cache.reset_prefixes())

    def state(self) -> EngineState:
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        waiting = len(scheduler.waiting)
        reasons: dict[str, int] = dict.fromkeys(("rows", "pages", "budget", "order", "step"), 0)
        reasons["grammar"] = len(scheduler.awaiting_grammar)
        if waiting:
            reasons[scheduler.head_waits_for or "step"] += 1
            reasons["order"] += waiting - 1
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            waiting_by_reason=reasons,
            num_used_pages=pool.num_used,
            num_cached_pages=len(pool.cached),
            num_free_pages=len(pool.blank),
            num_touched_pages=pool.num_touched,
            num_filled_slots=scheduler.slot_use()[0],
            num_host_pages_used=scheduler.cache.num_host_used,
            audits=self.audits,
            restarts=self.heartbeat.restarts(),
            rejections=self.queue_limit.rejections,
            blocked_seconds=self.journal.waits(self._clock()),
        )

    def _place(self, request_id: str) -> str:
        scheduler = self.scheduler
        leader = next((choice for choice in scheduler.choices(request_id) if scheduler.rows.waits(choice)), None)
        if leader is None:
            return ""
        place = scheduler.waiting.place(leader)
        return f"{place} {self.queue_limit.seconds_for(place, self._clock()):.1f}"

    def close(self) -> None:
        self.executor.close()
        if self._recorder is not None:
            self._recorder.close()

    def _take_prepared(self) -> None:
        """All that is ready. Waits for one only where somebody needs it and there is nothing else to do: whoever wanted what is
        ready may have left, and then nothing more will come."""
        is_needed = self.scheduler.awaiting_grammar and not (self._in_flight or self.scheduler.has_work)
        if self._prepared.empty() and not is_needed:
            return
        grammars = [self._prepared.get()]
        while not self._prepared.empty():
            grammars.append(self._prepared.get())
        ready = self.scheduler.prepared(grammars)
        if self._recorder is not None:
            for grammar in grammars:
                self._recorder.prepared(grammar)
        self.journal.readied(ready.let_in, self._clock())
        self._start(ready.jobs)

    def _start(self, jobs: list[GrammarJob]) -> None:
        for job in jobs:
            self.executor.prepare(job.grammar, job.forgets, functools.partial(self._is_ready, job.grammar))

    def _is_ready(self, grammar: str) -> None:
        """In whichever thread made it so."""
        self._prepared.put(grammar)
        self.on_prepared()

    def _note_plan(self, planned: Planned, now: float) -> None:
        plan, journal = planned.plan, self.journal
        if plan.leaves or planned.admitted:
            self.heartbeat.seat(plan.leaves, ((request.row, request.id) for request in planned.admitted))
        if planned.returned:
            journal.returned(planned.returned, now)
            for leaver in planned.returned:
                self.metrics.preempted(leaver.request.id)
        if planned.admitted:
            journal.admitted(planned.admitted, plan, now)
            self.queue_limit.moved(now, len(planned.admitted))
            self.heartbeat.move(self.queue_limit.seconds_for(1, now))
            for request in planned.admitted:
                self.metrics.admitted(request.id, now, request.num_cached)
        journal.planned(plan, planned.head, planned.head_waits_for, now)
        if planned.forked:
            journal.forked(planned.forked)

    def _note_commit(self, committed: Committed, now: float) -> None:
        plan, num_tokens, deltas = committed.plan, committed.num_tokens, committed.deltas
        self.metrics.step(now, num_tokens, deltas)
        self.journal.grammar_seconds += committed.result.grammar_seconds
        self.journal.committed(plan.step, len(plan.rows), num_tokens, now)
        if now >= self._history.due:
            scheduler = self.scheduler
            self._history.note(now, self.metrics.totals(), scheduler.cache.pool.num_used, scheduler.num_waiting)
        if committed.ended:
            reasons = {(delta.request_id, delta.index): delta.finish.reason for delta in deltas if delta.finish}
            self.journal.ended(committed.ended, reasons, now)
            self.journal.readied(committed.let_in, now)
            self._start(committed.jobs)
