"""The engine at this moment, looked at between two steps: rows, queue, pages, and what ended since the last look.
Knows nothing of who asks; nothing here runs while nobody does."""

from collections import deque

from octavo.cache.page_map import CACHED, FREE, SHARED, owner_code, owners_of, page_map
from octavo.messages import Answered, StepPlan
from octavo.observe.live import LiveEnd, LiveRow, LiveState, LiveWait, advice
from octavo.observe.metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.schedule.request import Request

MAX_WAITING = 100
MAX_ENDED = 100


class Endings:
    """The last requests that are over, numbered."""

    def __init__(self) -> None:
        self.number = 0
        self._kept: deque[LiveEnd] = deque(maxlen=MAX_ENDED)

    def answered(self, answered: Answered) -> None:
        if answered.stages:
            self.number += 1
            self._kept.append(
                LiveEnd(
                    self.number,
                    answered.ids[0],
                    answered.status,
                    answered.seconds,
                    answered.stages,
                    answered.prompt_tokens,
                    answered.output_tokens,
                    answered.preemptions,
                )
            )

    def since(self, number: int) -> list[LiveEnd]:
        return [end for end in self._kept if end.number > number]


def look(
    scheduler: Scheduler, metrics: EngineMetrics, plan: StepPlan | None, ended: list[LiveEnd], now: float
) -> LiveState:
    """`plan`: the last one that was made."""
    cache, report = scheduler.cache, metrics.report
    reason = scheduler.head_waits_for if len(scheduler.waiting) else None
    codes = page_map(cache)
    limits = {"rows": scheduler.max_rows, "pages": report.num_pages, "step_tokens": scheduler.max_step_tokens}
    return LiveState(
        time=now,
        step=scheduler.num_steps,
        totals=metrics.totals(),
        num_waiting=len(scheduler.waiting),
        rows=_rows(scheduler, metrics, plan),
        waiting=_waiting(scheduler, metrics, reason, now),
        blocked_by=reason,
        advice=advice(reason, len(scheduler.waiting), limits),
        num_pages=report.num_pages,
        page_size=report.page_size,
        max_rows=scheduler.max_rows,
        max_step_tokens=scheduler.max_step_tokens,
        num_host_pages=report.num_host_pages,
        num_host_pages_used=cache.num_host_used,
        num_shared_pages=codes.count(SHARED),
        num_cached_pages=codes.count(CACHED),
        num_free_pages=codes.count(FREE),
        ended=ended,
        pages=codes.tobytes(),
    )


def page_owners(scheduler: Scheduler, metrics: EngineMetrics, page: int) -> list[str]:
    """Names of the requests that hold a page."""
    sequences = set(owners_of(scheduler.cache, page))
    return [metrics.name_of(request.id) for request in scheduler.requests() if request.sequence in sequences]


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


def _waiting(scheduler: Scheduler, metrics: EngineMetrics, reason: str | None, now: float) -> list[LiveWait]:
    head = scheduler.waiting.head()
    waiting: list[Request] = scheduler.waiting.first(MAX_WAITING)
    hosts = scheduler.cache.host_tables
    return [
        LiveWait(
            metrics.name_of(request.id),
            "order" if request is not head else reason or "step",
            now - metrics.arrival_of(request.id, now),
            request.prompt_len,
            request.num_preemptions > 0,
            sum(len(table.pages) for table in hosts.get(request.sequence, ())),
        )
        for request in waiting
    ]
