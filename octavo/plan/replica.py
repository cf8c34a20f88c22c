"""SimulatedReplica: one engine's scheduler, cache and queue limit on a virtual clock.

It repeats the engine's loop (engine/loop.py): take inputs, plan, wait for the results that are due, commit. Steady stretches are promised,
not computed: until something comes, or the stretch ends, only its end is known; then it is taken in one jump (schedule/steady.py)."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

from octavo.admission.queue_limit import QueueLimit
from octavo.cache.span import pages_of
from octavo.errors import Overloaded
from octavo.messages import GenerateRequest, PageEvents, SamplingParams, StepResult
from octavo.observe.replica_feed import ReplicaFeed
from octavo.observe.step_observer import StepTimes
from octavo.plan.content import SimulatedCache
from octavo.plan.figures import Histogram, Journey
from octavo.plan.settings import ReplicaSettings
from octavo.plan.step_model import AFTER_FIRST, PICOSECONDS, StepClock, StepModel
from octavo.schedule import POLICIES, Scheduler
from octavo.schedule.request import Request
from octavo.schedule.results import Planned
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.steady import jump, steady_steps
from octavo.schedule.step_costs import StepCosts, shape_of

NEVER = 1 << 200
EVENT_PICOSECONDS = PICOSECONDS // 50  # as engine/driver.py: between two reports to routers
_MOST_STEPS = 1 << 20  # of one stretch
_PARAMS: dict[int, SamplingParams] = {}  # by max_tokens: making one checks all of its fields


class _Promise(NamedTuple):
    """A steady stretch that has begun and was not taken yet."""

    last: Planned
    num_steps: int
    base: int  # of its first step, in picoseconds
    more: int  # that each further step takes longer


def _sum(base: int, more: int, num_steps: int) -> int:
    return num_steps * base + more * (num_steps * (num_steps - 1) // 2)


def _steps_before(base: int, more: int, time: int) -> int:
    """The fewest steps that take at least `time`."""
    if time <= 0:
        return 0
    if not more:
        return -(-time // base)
    # more n² / 2 + (base − more / 2) n ≥ time
    half = 2 * base - more
    steps = max(0, (isqrt(half * half + 8 * more * time) - half) // (2 * more))
    while _sum(base, more, steps) < time:
        steps += 1
    while steps and _sum(base, more, steps - 1) >= time:
        steps -= 1
    return steps


class SimulatedReplica:
    def __init__(
        self,
        number: int,
        settings: ReplicaSettings,
        model: StepModel,
        costs: StepCosts,
        on_first: Callable[[Journey], None],
        on_end: Callable[[Journey], None],
        *,
        epoch: int = 1,
        now: int = 0,
        report: Callable[[PageEvents], object] | None = None,
        with_jumps: bool = True,
        pace: Callable[[int], float] | None = None,
        draw: int = 0,
    ) -> None:
        """`report`: hears what a router hears; None: there is no router. `with_jumps` False: every plan is made one by one. `pace`: how many
        times as long a step takes that begins at this time, without jumps."""
        assert pace is None or not with_jumps
        self._first_noise = number + 7919 * draw  # of its first step
        self._pace = pace
        self.number, self.epoch, self.settings = number, epoch, settings
        self.cache = SimulatedCache(
            settings.num_pages, settings.page_size, settings.num_host_pages, settings.enable_prefix_caching, None,
            settings.windows, settings.max_num_batched_tokens, eviction=settings.prefix_eviction,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.cache, settings.max_num_seqs, settings.max_num_batched_tokens, settings.page_size,
            POLICIES[settings.scheduling_policy], StallLimit.of(settings.max_inter_token_ms), settings.num_stages,
        )  # fmt: skip
        self.scheduler.learn(costs)
        self.queue_limit = QueueLimit(settings.max_waiting_requests, settings.max_waiting_tokens)
        self.feed = None if report is None else ReplicaFeed(self.scheduler, number, epoch)
        self._report = report or (lambda events: None)
        self._has_news = False  # that the router has not heard
        self._reported = -EVENT_PICOSECONDS
        self.now = now  # when the next plan is made
        self.started = now
        self.journeys: dict[str, Journey] = {}
        self.waits: Counter[str] = Counter()  # picoseconds
        # Between tokens, by whether a prompt was in the step that gave the second one, and by the rows of that step, as a power of two.
        self.gaps: defaultdict[tuple[bool, int], Histogram] = defaultdict(Histogram)
        self.queue_times: list[float] = []
        self.busy = 0
        self.num_steps = self.num_plans = self.num_rows = 0
        self.most_pages = self.most_waiting = 0
        self._clock, self._depth = StepClock(model), 0  # plans in flight while the next is made
        self._wakes = True  # the next step is the first after it was idle
        self._since_first = AFTER_FIRST  # steps that were planned since one that gave a first token
        self._on_first, self._on_end, self._with_jumps = on_first, on_end, with_jumps
        self._flight: deque[tuple[Planned, int, int]] = deque()  # (plan, its duration, when it ends)
        self._promise: _Promise | None = None
        self.on_plan: Callable[[Planned], None] | None = None  # for tests: every plan that is made one by one

    # ── inputs ──

    @property
    def wake(self) -> int:
        """When it next makes a plan by itself."""
        promise = self._promise
        if promise is None:
            return self.now if self._has_work else NEVER
        return self._end_of(promise, promise.num_steps)

    @property
    def _has_work(self) -> bool:
        return bool(self._flight) or self.scheduler.has_work

    def add(self, journey: Journey, now: int, num_expected: int = 0) -> str:
        """A request comes. Returns why it is refused; empty: it is not."""
        self.catch_up(now)
        if not self._has_work:
            self.now, self._wakes, self._since_first = max(self.now, now), True, AFTER_FIRST
        most = journey.prompt_len + journey.output_len
        settings = self.settings
        if most > settings.max_model_len or not self._fits(most):
            return "too_long"
        params = _PARAMS.get(journey.output_len)
        if params is None:
            params = _PARAMS[journey.output_len] = SamplingParams(seed=0, max_tokens=journey.output_len)
        tokens = journey.tokens
        request = GenerateRequest(
            journey.request_id, tokens[: journey.prompt_len], params, [], num_expected=num_expected,
            begun=[tokens[journey.prompt_len : journey.prompt_len + journey.num_sent]] if journey.num_sent else [],
        )  # fmt: skip
        try:
            if not request.begun:
                self.queue_limit.check(request, self.scheduler, now / PICOSECONDS)
        except Overloaded:
            return "queue_full"
        journey.replica = self.number
        self.journeys[journey.request_id] = journey
        self.scheduler.add(request)
        self.most_waiting = max(self.most_waiting, len(self.scheduler.waiting))
        if self.feed is not None:
            self.feed.received(request.origin)
            self.feed.arrived(request, now / PICOSECONDS, False)
            self._has_news = True
        return ""

    def _fits(self, num_tokens: int) -> bool:
        cache = self.cache
        needed = pages_of(num_tokens, cache.page_size, cache.windows, self.scheduler.max_step_tokens)
        return needed <= cache.pool.num_pages

    # ── time ──

    def catch_up(self, time: int) -> None:
        """Run all that begins before `time`."""
        while True:
            if self._promise is not None:
                if self._end_of(self._promise, 0) >= time:
                    self._promise = None
                    return
                self._keep(time)
                continue
            if self.now >= time or not self._has_work:
                return
            self.iterate()

    def iterate(self) -> None:
        """One turn of the loop, at `now`; or the end of a promised stretch, and the turn after it."""
        if self._promise is not None:
            self._keep(NEVER)
        scheduler, flight, planned_at = self.scheduler, self._flight, self.now
        planned = scheduler.plan()
        self.num_plans += 1
        if self.on_plan is not None:
            self.on_plan(planned)
        if planned.admitted:
            self._note_admitted(planned)
        if self.feed is not None:
            if planned.admitted or planned.returned:
                self.feed.rows_changed(planned, 0.0)
            self.feed.planned(planned, 0.0)
        if not planned.is_empty:
            shape = shape_of(planned.plan, planned.num_tokens)
            duration = self._clock.step(shape, self.num_steps + self._first_noise)
            duration += self._clock.more(self._wakes, self._since_first)
            self._wakes = False
            if self._clock.has_firsts:
                self._since_first = 0 if self._gives_first(planned) else self._since_first + 1
            begins = max(self.now, flight[-1][2]) if flight else self.now
            if self._pace is not None:
                duration = round(duration * self._pace(begins))
            flight.append((planned, duration, begins + duration))
            self._depth = self.settings.depth if len(planned.requests) >= self.settings.overlap_rows else 0
            self.num_steps += 1
            self.num_rows += len(planned.requests)
            self.busy += duration
        elif not flight:
            assert planned.returned or not scheduler.has_work, "nothing will ever change"
        # The tokens of all steps that are taken in at once are sent together, after the last of them.
        num_due = max(len(flight) - self._depth, int(planned.is_empty and bool(flight)))
        ends = flight[num_due - 1][2] if num_due else self.now
        for _ in range(num_due):
            taken, duration, _ = flight.popleft()
            self._commit(taken, duration, ends)
        if planned.head_waits_for is not None:
            self.waits[planned.head_waits_for] += self.now - planned_at
        self.most_pages = max(self.most_pages, self.cache.pool.num_used)
        if self.feed is not None:
            self._tell_news(self.feed, planned)
        self._make_promise(planned)

    def _gives_first(self, planned: Planned) -> bool:
        """Whether some request of a plan has its first token from it."""
        plan, journeys = planned.plan, self.journeys
        rows = zip(planned.requests, plan.starts, plan.counts, strict=True)
        return any(start + count == journeys[request.id].prompt_len for request, start, count in rows)

    def _tell_news(self, feed: ReplicaFeed, planned: Planned) -> None:
        """Report to the router, as often as an engine does. A step in which rows only went on is no news: what routers would hear of it
        are pages of unfinished answers, which no request can begin with."""
        is_quiet = not planned.admitted and not planned.returned and planned.num_tokens == len(planned.requests)
        if not is_quiet or len(self.scheduler.running) != len(planned.requests):
            self._has_news = True
        if self._has_news and (self.now - self._reported >= EVENT_PICOSECONDS or not self._has_work):
            self._has_news, self._reported = False, self.now
            self._report(feed.take())

    def _commit(self, planned: Planned, duration: int, ends: int) -> None:
        plan, journeys = planned.plan, self.journeys
        now = self.now = max(self.now, ends)
        tokens = [
            journeys[request.id].tokens[len(request.tokens)]
            for request, samples in zip(planned.requests, plan.samples, strict=True)
            if samples
        ]
        committed = self.scheduler.commit(plan, StepResult(plan.step, tokens))
        rows = len(planned.requests)
        gaps = self.gaps[planned.num_tokens > rows, rows.bit_length()]
        gap, count = -1, 0
        for delta in committed.deltas:
            if not delta.token_ids:
                continue
            journey = journeys[delta.request_id]
            if journey.first < 0:
                journey.first = now
                self._on_first(journey)
            else:
                own = now - journey.last
                if own > journey.longest_gap:
                    journey.longest_gap = own
                if own == gap:
                    count += 1
                else:
                    if count:
                        gaps.add(gap, count)
                    gap, count = own, 1
            journey.last = now
            if delta.finish is not None:
                journey.ended = now
                journey.tokens = []
                del journeys[delta.request_id]
                self._on_end(journey)
        if count:
            gaps.add(gap, count)
        if self.feed is not None:
            self.feed.committed(committed, StepTimes(0.0, duration / PICOSECONDS))

    def _note_admitted(self, planned: Planned) -> None:
        for request in planned.admitted:
            journey = self.journeys[request.id]
            if not request.num_preemptions:
                self.queue_times.append((self.now - journey.arrived) / PICOSECONDS)

    # ── steady stretches ──

    def _make_promise(self, planned: Planned) -> None:
        if not self._with_jumps or (self._clock.has_firsts and self._since_first < AFTER_FIRST):
            return
        num_steps = min(steady_steps(self.scheduler, planned), _MOST_STEPS)
        if num_steps < 2:
            return
        running, pool = self.scheduler.running, self.cache.pool
        if self._flight and any(self.journeys[request.id].first < 0 for request in running):
            return  # the plan in flight brings a first token, which the router hears of
        # As many steps as are sure to find their pages.
        most_pages = pool.num_free // len(running)
        num_steps = min(num_steps, most_pages * self.cache.page_size)
        context = self._clock.context(len(running))
        base = self._clock.base(len(running)) + context * sum([request.computed for request in running])
        more = context * len(running)
        if self._has_news:  # the step that reports is no part of a stretch
            due = self._reported + EVENT_PICOSECONDS
            num_steps = min(num_steps, self._num_before(base, more, due) - 1)
        if num_steps > 0:
            self._promise = _Promise(planned, num_steps, base, more)

    def _num_before(self, base: int, more: int, time: int) -> int:
        """How many plans of a stretch are made before `time`."""
        if not self._flight:
            return _steps_before(base, more, time - self.now)
        ends = self._flight[0][2]
        return 0 if self.now >= time else 1 + _steps_before(base, more, time - ends)

    def _end_of(self, promise: _Promise, num_steps: int) -> int:
        """When the plan after so many of the stretch's is made."""
        if not num_steps:
            return self.now
        if not self._flight:
            return self.now + _sum(promise.base, promise.more, num_steps)
        return self._flight[0][2] + _sum(promise.base, promise.more, num_steps - 1)

    def _keep(self, time: int) -> None:
        """Take the part of the promised stretch whose plans are made before `time`."""
        promise = self._promise
        assert promise is not None
        self._promise = None
        last, num_steps, base, more = promise
        if time < NEVER:
            num_steps = min(num_steps, self._num_before(base, more, time))
        running = self.scheduler.running
        before, flight = self.now, self._flight
        num_done = jump(self.scheduler, last, num_steps, self._next_tokens).num_steps
        if not num_done:
            return
        rows, journeys = len(running), self.journeys
        now = self.now = self._end_of(promise, num_done)
        self.num_steps += num_done
        self.num_rows += num_done * rows
        self.busy += _sum(base, more, num_done)
        self.gaps[False, rows.bit_length()].add((now - before) // num_done, num_done * rows)
        gap = base + more * (num_done - 1)
        for request in running:
            journey = journeys[request.id]
            journey.last = now
            if gap > journey.longest_gap:
                journey.longest_gap = gap
        durations = [base + more * at for at in range(num_done)]
        if flight:
            planned, duration, ends = flight.popleft()
            durations = [duration, *durations[:-1]]  # of the steps that were committed
            flight.append((planned, base + more * (num_done - 1), ends + _sum(base, more, num_done)))
        if last.head_waits_for is not None:
            self.waits[last.head_waits_for] += now - before
        if self.feed is not None:
            self.feed.jumped(rows, [duration / PICOSECONDS for duration in durations])
        self.most_pages = max(self.most_pages, self.cache.pool.num_used)

    def _next_tokens(self, request: Request, count: int) -> list[int]:
        at = len(request.tokens)
        return self.journeys[request.id].tokens[at : at + count]

    # ── its end ──

    def stop(self, time: int) -> list[Journey]:
        """It ends at `time`. Returns its open requests, oldest first."""
        self.catch_up(time)
        for request in self.scheduler.requests():
            self.journeys[request.id].num_sent = len(request.tokens) - request.prompt_len
        return list(self.journeys.values())
