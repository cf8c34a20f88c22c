"""RunStats: figures of one run of the scheduler, recorded or simulated: steps, waits, first tokens, pages."""

from collections import Counter
from collections.abc import Iterable

from octavo.messages import StepPlan, TokenDelta
from octavo.schedule import Scheduler


class RunStats:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0  # computed
        self.num_rows = 0  # summed over the steps
        self.num_requests = 0
        self.num_refused = 0  # by settings that have no room for them
        self.num_output = 0
        self.most_rows = 0
        self.most_pages = 0
        self.preemptions = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.seconds = 0.0  # of computed steps
        self.waits: Counter[str] = Counter()  # requests × steps, by what they waited for
        self.first_steps: list[int] = []  # steps up to and with the one that gave a request's first token
        self.first_seconds: list[float] = []
        self._arrived: dict[str, tuple[int, float]] = {}  # requests without a token: (steps before, when)

    def arrived(self, name: str, seconds: float) -> None:
        self.num_requests += 1
        self._arrived[name] = (self.num_steps, seconds)

    def left(self, name: str) -> None:
        self._arrived.pop(name, None)

    def planned(self, scheduler: Scheduler, plan: StepPlan) -> None:
        pool = scheduler.cache.pool
        self.most_pages = max(self.most_pages, pool.num_used)
        if plan.is_empty:
            return
        self.num_steps += 1
        self.num_rows += len(plan.rows)
        self.num_tokens += sum(plan.counts)
        self.most_rows = max(self.most_rows, len(plan.rows))
        if (head := scheduler.waiting.head()) is not None:
            num_primaries = scheduler.waiting.primaries.num_requests
            self.waits[scheduler.head_waits_for or "order"] += 1
            self.waits["order"] += num_primaries - head.is_primary
            self.waits["turn"] += len(scheduler.waiting) - num_primaries - (not head.is_primary)

    def gave(self, deltas: Iterable[TokenDelta], seconds: float) -> None:
        """A step's deltas, and when they came."""
        for delta in deltas:
            if delta.token_ids or delta.finish is not None:
                self.num_output += len(delta.token_ids)
                if (arrival := self._arrived.pop(delta.request_id, None)) is not None:
                    self.first_steps.append(self.num_steps - arrival[0])
                    self.first_seconds.append(seconds - arrival[1])

    def end(self, scheduler: Scheduler, preemptions_before: int = 0) -> None:
        self.preemptions = scheduler.num_preemptions - preemptions_before


def at(values: list[float] | list[int], share: float) -> float | None:
    """The quantile: `share` of the values lie at or below it. None: there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
