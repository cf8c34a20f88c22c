"""EngineControl: everything that can be asked of an engine beside requests, between two of its steps: metrics, progress, journeys,
the live view, a request's place in the queue; whether a request may wait; and what an idle engine does."""

import logging
from collections.abc import Callable

import msgspec

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import audit
from octavo.engine.live_view import LiveView
from octavo.engine.loop import EngineLoop
from octavo.engine.progress import progress_of
from octavo.errors import Overloaded
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.memory_trim import trim_heap
from octavo.messages import (
    ASLEEP,
    AWAKE,
    Control,
    GenerateRequest,
    HoldPrefix,
    LoadAdapter,
    Ping,
    PrefixReply,
    ReadHistory,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadPrefixes,
    ReadProgress,
    ReadSleep,
    ReleasePrefix,
    ResetPrefixCache,
    Responded,
    SleepEngine,
    WakeEngine,
)
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.journeys.journey import JourneyRing, journeys_json
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.metrics.gauges import EngineState, HoldState, TierState
from octavo.observe.replica_feed import ReplicaFeed
from octavo.schedule import Scheduler

log = logging.getLogger("octavo.engine")


class PageAudits:
    """Checks the bookkeeping of the pages while nothing runs, once for what was computed since the last time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.counts = {"right": 0, "wrong": 0}
        self.problems: list[str] = []  # what the last audit found
        self._num_steps = 0  # before the last one

    def run(self) -> None:
        if self._num_steps == self._scheduler.num_steps:
            return
        self._num_steps = self._scheduler.num_steps
        self.problems = audit(self._scheduler.cache, self._scheduler.is_idle)
        self.counts["wrong" if self.problems else "right"] += 1
        for problem in self.problems:
            log.error("the page audit found a problem: %s", problem)


class EngineControl:
    def __init__(
        self,
        loop: EngineLoop,
        metrics: EngineMetrics,
        journal: EngineJournal,
        live_view: LiveView,
        queue_limit: QueueLimit,
        heartbeat: Heartbeat,
        ring: JourneyRing,
        clock: Callable[[], float],
    ) -> None:
        self.metrics, self.journal, self.live_view = metrics, journal, live_view
        self.queue_limit, self.heartbeat, self.ring = queue_limit, heartbeat, ring
        self.feed: ReplicaFeed | None = None  # for routers; None: none listens
        self.audits = PageAudits(loop.scheduler)
        self._loop, self._scheduler, self._clock = loop, loop.scheduler, clock
        self._num_trimmed = 0  # steps before memory was given back last

    def reply(self, control: Control) -> str:
        match control:
            case ReadMetrics():
                self._audit()
                return self.metrics.text(self.state())
            case ReadProgress():
                progress = progress_of(self._scheduler, self.metrics, self._clock(), control.owner)
                progress = msgspec.structs.replace(progress, page_problems=self.audits.problems)
                return msgspec.json.encode(progress).decode()
            case ReadPlace():
                return self._place(control.request_id)
            case Ping():
                return "pong"
            case ReadJourneys():
                now, requests = self._clock(), self._scheduler.requests()
                open_parts = self.journal.open_parts(requests, now, control.request_id, control.owner)
                return journeys_json(open_parts, self.ring, control)
            case ReadLive():
                return msgspec.json.encode(self.live_view.look(control.since, self._clock())).decode()
            case ReadHistory():
                return msgspec.json.encode(self.live_view.history(control.seconds, self._clock())).decode()
            case ReadPage():
                return msgspec.json.encode(self.live_view.page_owners(control.page, control.owner)).decode()
            case ResetPrefixCache():
                return str(self._loop.reset_prefixes())
            case HoldPrefix() | ReleasePrefix() | ReadPrefixes():
                return msgspec.json.encode(self._prefixes(control)).decode()
            case WakeEngine():
                self._loop.wake_up()
                return AWAKE
            case ReadSleep():
                return ASLEEP if self._loop.is_asleep else AWAKE
            case SleepEngine():
                raise AssertionError("the driver replies when it sleeps")
            case LoadAdapter():
                raise AssertionError("the driver replies when it is loaded")

    def _prefixes(self, control: HoldPrefix | ReleasePrefix | ReadPrefixes) -> PrefixReply:
        holds = self._loop.holds
        if holds is None:
            return PrefixReply(error="this engine holds no prefixes")
        match control:
            case HoldPrefix():
                return holds.pin(control)
            case ReleasePrefix():
                return holds.unpin(control)
            case ReadPrefixes():
                return holds.reply(control.owner)

    def responded(self, responded: Responded) -> None:
        """An API process is done with an HTTP request. What became of it is kept here, where every API process can ask for it."""
        if not responded.is_old:
            self.metrics.responded(responded)
        self.live_view.responded(responded)
        if responded.journey:
            self.ring.keep(responded.ids, responded.journey, responded.at, responded.is_old, responded.owner)

    def check(self, request: GenerateRequest) -> None:
        """Raises Overloaded where the queue takes no more, or the request wanted to wait no longer than until now."""
        if request.queue_until and self._clock() >= request.queue_until and not any(request.begun):
            raise self.overdue()
        if not request.begun:
            self.queue_limit.check(request, self._scheduler, self._clock())

    def overdue(self) -> Overloaded:
        """The error of a request that waited for its max_queue_ms."""
        self.queue_limit.rejections["queue_time"] += 1
        waiting = self._scheduler.num_waiting
        message = f"no row was free within the request's max_queue_ms; {waiting} requests are waiting"
        return Overloaded(message, self.queue_limit.retry_after(waiting, self._clock()))

    def rest(self) -> None:
        """No message has come for a while. If anything was computed since the last time, audit the pages and give memory back."""
        self._audit()
        self._loop.limit_idle()
        if self._loop.holds is not None:
            self._loop.holds.take()
        self._loop.take_tier_events()
        if not self._loop.has_work and self._num_trimmed != self._scheduler.num_steps:
            self._num_trimmed = self._scheduler.num_steps
            trim_heap()

    def sleep(self) -> None:
        """Give memory back until the next request. None may be open."""
        self._audit()
        self._loop.sleep()
        self._num_trimmed = self._scheduler.num_steps
        trim_heap()

    def state(self) -> EngineState:
        scheduler, pool = self._scheduler, self._scheduler.cache.pool
        waiting = len(scheduler.waiting)
        reasons: dict[str, int] = dict.fromkeys(("rows", "pages", "budget", "streams", "order", "turn", "step"), 0)
        reasons["grammar"] = len(scheduler.awaiting_grammar)
        if (head := scheduler.waiting.head()) is not None:
            num_primaries = scheduler.waiting.primaries.num_requests
            reasons[scheduler.head_waits_for or "step"] += 1
            reasons["order"] += num_primaries - head.is_primary
            reasons["turn"] += waiting - num_primaries - (not head.is_primary)
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
            audits=self.audits.counts,
            restarts=self.heartbeat.restarts(),
            refusals=self.heartbeat.refusals(),
            rejections=self.queue_limit.rejections,
            blocked_seconds=self.journal.waits(self._clock()),
            tier=TierState() if self._loop.tier is None else self._loop.tier.state(),
            adapters=None if self._loop.adapters is None else self._loop.adapters.state(),
            holds=HoldState() if self._loop.holds is None else self._loop.holds.state(),
        )

    def _audit(self) -> None:
        if not self._loop.has_work:
            self.audits.run()

    def _place(self, request_id: str) -> str:
        """A request's place in the queue and the estimated seconds until it has a row, as text. Empty: it does not wait."""
        scheduler = self._scheduler
        leader = next((choice for choice in scheduler.choices(request_id) if scheduler.rows.waits(choice)), None)
        if leader is None:
            return ""
        place = scheduler.waiting.place(leader)
        return f"{place} {self.queue_limit.seconds_for(place, self._clock()):.1f}"
