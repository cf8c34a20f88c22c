"""LiveView: the engine at this moment, looked at between two steps: rows, queue, pages, and what ended since the last look."""

from bisect import insort
from collections.abc import Callable
from itertools import islice

from octavo.cache.page_map import CACHED, FREE, HELD, LOADING, SHARED, owner_code, owners_of, page_map
from octavo.messages import GenerateRequest, Responded, StepPlan
from octavo.observe.advice import LATELY_SECONDS, Standing, advice
from octavo.observe.history import History
from octavo.observe.journeys.stages import WaitReason
from octavo.observe.live_state import LiveEnd, LiveHistory, LiveLane, LiveLook, LiveRow, LiveState, LiveWait
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.metrics.gauges import TierState
from octavo.observe.step_observer import StepEnd, StepObserver
from octavo.schedule import Scheduler
from octavo.schedule.request import Request

MAX_WAITING = 100
MAX_ENDED = 100
MAX_LANES = 8
MAX_COUNTED = 5000
"""Requests of the queue that are shown; the rest is one lane, because walking a long queue would delay the steps."""


class Endings:
    """The last HTTP requests that are over, numbered."""

    def __init__(self) -> None:
        self.number = 0
        self._kept: list[tuple[LiveEnd, bytes]] = []  # with its owner, oldest first

    def responded(self, responded: Responded) -> None:
        if not responded.stages:
            return
        self.number += 1
        end = LiveEnd(
            self.number,
            responded.ids[0],
            responded.status,
            responded.seconds,
            responded.stages,
            responded.prompt_tokens,
            responded.output_tokens,
            responded.preemptions,
            responded.at,
            responded.cached_tokens,
            responded.cache_miss,
            responded.differs_at,
        )
        # Not always the latest: API processes send a new engine what they had sent its predecessor.
        insort(self._kept, (end, responded.owner), key=lambda kept: kept[0].at)
        del self._kept[:-MAX_ENDED]

    def since(self, number: int) -> list[tuple[LiveEnd, bytes]]:
        return [kept for kept in self._kept if kept[0].number > number]


class LiveView(StepObserver):
    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics, history: History) -> None:
        """`metrics` must hear of a step before this does. `history`: of this engine and those before it."""
        self._scheduler, self._metrics = scheduler, metrics
        self._plan: StepPlan | None = None  # the last one that was submitted
        self._endings, self._history = Endings(), history
        self.tier_state: Callable[[], TierState] | None = None  # None: there is no tier

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        if now >= self._history.due:  # perhaps after a rest
            self._note()
            self._history.resume(now)

    def stepped(self, end: StepEnd) -> None:
        if not end.planned.is_empty:
            self._plan = end.planned.plan
        self._history.last_step = end.now
        if end.now >= self._history.due:
            self._note()

    def _note(self) -> None:
        scheduler, num_pages = self._scheduler, max(1, self._metrics.report.num_pages)
        used = scheduler.cache.pool.num_used / num_pages
        self._history.note(self._metrics.totals(), used, scheduler.num_waiting, len(scheduler.running))

    def responded(self, responded: Responded) -> None:
        self._endings.responded(responded)

    def look(self, since: int, now: float) -> LiveLook:
        """With the requests that ended after number `since`."""
        scheduler, metrics, history = self._scheduler, self._metrics, self._history
        cache, report = scheduler.cache, metrics.report
        self._note()
        reason = _reason(scheduler)
        codes = page_map(cache)
        totals = metrics.totals()
        num_held = codes.count(HELD)
        num_cached, num_free = codes.count(CACHED) + num_held, codes.count(FREE)
        tier = TierState() if self.tier_state is None else self.tier_state()
        num_preempted = history.preemptions_since(now - LATELY_SECONDS)
        waiting = _first_waiting(scheduler)
        ended = self._endings.since(since)
        state = LiveState(
            time=now,
            step=scheduler.num_steps,
            totals=totals,
            num_waiting=scheduler.num_waiting,
            rows=_rows(scheduler, metrics, self._plan),
            waiting=_waiting(scheduler, metrics, waiting, reason, now),
            lanes=_lanes(scheduler, metrics, now),
            blocked_by=reason,
            advice=advice(_standing(scheduler, metrics, num_cached + num_free, num_preempted)),
            num_pages=report.num_pages,
            page_size=report.page_size,
            max_rows=scheduler.max_rows,
            max_step_tokens=scheduler.max_step_tokens,
            num_host_pages=report.num_host_pages,
            num_host_pages_used=cache.num_host_used,
            num_shared_pages=codes.count(SHARED),
            num_cached_pages=num_cached,
            num_free_pages=num_free,
            ended=[end for end, _ in ended],
            recent=history.recent(now),
            pages=codes.tobytes(),
            num_held_pages=num_held,
            num_loading_pages=codes.count(LOADING),
            num_tier_pages=tier.num_pages,
            tier_bytes=tier.num_bytes,
            num_ram_pages=tier.num_ram_pages,
            ram_tier_bytes=tier.ram_bytes,
        )
        return LiveLook(
            state,
            [metrics.owner_of(request.id) for request in scheduler.running],
            [metrics.owner_of(request.id) for request in waiting],
            [owner for _, owner in ended],
        )

    def history(self, seconds: float, now: float) -> LiveHistory:
        self._note()
        return self._history.read(seconds, now)

    def page_owners(self, page: int, owner: bytes | None = None) -> list[str]:
        """Names of the requests that hold a page. `owner`: only of this API key's; None: of all."""
        sequences, metrics = set(owners_of(self._scheduler.cache, page)), self._metrics
        return [
            metrics.name_of(request.id)
            for request in self._scheduler.requests()
            if request.sequence in sequences and owner in (None, metrics.owner_of(request.id))
        ]


def _reason(scheduler: Scheduler) -> WaitReason | None:
    return scheduler.head_waits_for if len(scheduler.waiting) else "grammar" if scheduler.awaiting_grammar else None


def _rows(scheduler: Scheduler, metrics: EngineMetrics, plan: StepPlan | None) -> list[LiveRow]:
    counts = dict(zip(plan.rows, plan.counts, strict=True)) if plan is not None else {}
    tables = scheduler.cache.tables
    return [
        LiveRow(
            request.row,
            metrics.name_of(request.id),
            request.index,
            counts.get(request.row, 0) > 1 or request.computed < request.prompt_len,
            counts.get(request.row, 0),
            request.length,
            request.prompt_len,
            request.max_len,
            sum(len(table.pages) for table in tables.get(request.sequence, ())),
            owner_code(request.sequence),
        )
        for request in scheduler.running
    ]


def _first_waiting(scheduler: Scheduler) -> list[Request]:
    """The requests of the queue that are shown."""
    awaiting_grammar = islice(scheduler.awaiting_grammar.values(), MAX_WAITING)
    return [*scheduler.waiting.first(MAX_WAITING), *awaiting_grammar]


def _waiting(
    scheduler: Scheduler, metrics: EngineMetrics, waiting: list[Request], reason: str | None, now: float
) -> list[LiveWait]:
    head = scheduler.waiting.head()
    hosts = scheduler.cache.host_tables
    return [
        LiveWait(
            metrics.name_of(request.id),
            "grammar"
            if request.sequence in scheduler.awaiting_grammar
            else reason or "step"
            if request is head
            else "order"
            if request.is_primary
            else "turn",
            now - metrics.arrival_of(request.id, now),
            request.prompt_len,
            request.num_preemptions > 0,
            sum(len(table.pages) for table in hosts.get(request.sequence, ())),
        )
        for request in waiting
    ]


def _lanes(scheduler: Scheduler, metrics: EngineMetrics, now: float) -> list[LiveLane]:
    """Preempted requests, and new ones; these by priority, if that is the policy."""
    found: dict[tuple[int, str], tuple[int, float]] = {}  # (order, name) → how many, when the oldest came
    by_priority = scheduler.has_priorities
    for request in islice(scheduler.waiting, MAX_COUNTED):
        rank = request.rank
        name = "preempted" if request.num_preemptions else f"priority {rank}" if by_priority else "new"
        key = (rank, name) if request.num_preemptions == 0 else (-(2**63), name)
        count, oldest = found.get(key, (0, now))
        found[key] = (count + 1, min(oldest, metrics.arrival_of(request.id, now)))
    lanes = [LiveLane(name, count, now - oldest) for (_, name), (count, oldest) in sorted(found.items())]
    if len(lanes) > MAX_LANES:
        rest = lanes[MAX_LANES - 1 :]
        others = LiveLane("others", sum(lane.count for lane in rest), max(lane.oldest_seconds for lane in rest))
        lanes = [*lanes[: MAX_LANES - 1], others]
    if len(scheduler.waiting) > MAX_COUNTED:
        lanes.append(LiveLane("further back", len(scheduler.waiting) - MAX_COUNTED, 0.0))
    if scheduler.awaiting_grammar:
        oldest = min(
            metrics.arrival_of(request.id, now) for request in islice(scheduler.awaiting_grammar.values(), MAX_COUNTED)
        )
        lanes.append(LiveLane("grammar", len(scheduler.awaiting_grammar), now - oldest))
    return lanes


def _standing(scheduler: Scheduler, metrics: EngineMetrics, num_open_pages: int, num_preempted: int) -> Standing:
    head, report = scheduler.waiting.head(), metrics.report
    tokens = head.length if head is not None else 0
    groups = len(scheduler.cache.windows)
    return Standing(
        num_waiting=scheduler.num_waiting,
        reason=_reason(scheduler),
        num_rows=len(scheduler.running),
        max_rows=scheduler.max_rows,
        num_pages=report.num_pages,
        num_open_pages=num_open_pages,
        max_step_tokens=scheduler.max_step_tokens,
        head_tokens=tokens,
        head_pages=-(-tokens // report.page_size) * groups,
        spare_pages=len(scheduler.running) // 2 * groups,
        num_preempted=num_preempted,
        is_cpu=report.device.startswith("cpu"),
        has_swap=report.num_host_pages > 0,
        limit_ms=metrics.limit_seconds * 1e3,
    )
