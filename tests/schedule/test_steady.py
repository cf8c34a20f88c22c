"""Jumps over steady stretches against plan() and commit(), step by step."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache
from octavo.cache.span import pages_of
from octavo.messages import GenerateRequest, SamplingParams, StepPlan, StepResult
from octavo.schedule import POLICIES, Scheduler
from octavo.schedule.request import Request
from octavo.schedule.results import Planned
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.steady import Jump, jump, steady_steps
from octavo.schedule.step_costs import StepCosts

STOP = 9


@dataclass
class Case:
    """Everything that is random about a case, drawn from one seed."""

    seed: int
    has_windows: bool = False
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.page_size, self.depth = r.choice([1, 2, 3, 4, 16]), r.choice([0, 1])
        self.budget, self.rows = r.choice([1, 3, 8, 64]), r.choice([1, 2, 3, 8])
        self.windows = r.choice([(5,), (0, 8), (3, 0, 3)]) if self.has_windows else (0,)
        longest = r.choice([20, 60])
        least = pages_of(longest + 80, self.page_size, self.windows, self.budget)
        self.num_pages = least + r.choice([0, 1, 5, 200]) * len(self.windows)
        self.num_host_pages, self.shares = r.choice([0, 0, 40]), r.random() < 0.8
        self.policy, self.limit = (
            r.choice(["fcfs", "priority"]),
            r.choice([None, None, StallLimit(0.0), StallLimit(0.05)]),
        )
        stems = [[r.randrange(3) for _ in range(longest)] for _ in range(2)]
        self.inputs: list[tuple[int, GenerateRequest | str]] = []
        for number in range(r.randrange(1, 12)):
            prompt = r.choice(stems)[: r.randrange(longest)] + [r.randrange(3) for _ in range(r.randrange(1, 9))]
            params = SamplingParams(n=r.choice([1, 1, 1, 2]), seed=r.randrange(3), max_tokens=r.randrange(1, 72))
            source = GenerateRequest(f"r{number}", prompt, params, r.choice([[], [STOP]]), priority=r.choice([0, 0, 1]))
            moment = r.randrange(0, 120)
            self.inputs.append((moment, source))
            if r.random() < 0.1:
                self.inputs.append((moment + r.randrange(40), source.id))
        self.inputs.sort(key=lambda each: each[0])

    def token(self, request: Request, position: int) -> int:
        """Few different tokens and few different sequences, so that outputs are found in the prefix cache, too."""
        if request.stop_ids and position - request.prompt_len == 7 + request.seed % 40:
            return STOP
        return hash((request.seed % 2, position)) % 3

    def next_tokens(self, request: Request, count: int) -> list[int]:
        first = len(request.tokens)
        return [self.token(request, first + at) for at in range(count)]

    def before_stop(self, request: Request) -> int:
        """How many tokens it samples next that do not end it."""
        if not request.stop_ids:
            return 1 << 30
        return request.prompt_len + 7 + request.seed % 40 - len(request.tokens)

    def run(self, with_jumps: bool) -> "tuple[list[StepPlan], list[object]]":
        cache = KVCache(
            self.num_pages, self.page_size, self.num_host_pages, self.shares, None, self.windows, self.budget
        )
        scheduler = Scheduler(cache, self.rows, self.budget, 0, POLICIES[self.policy], self.limit)
        scheduler.learn(StepCosts(0.01, 0.001, 0.0005, 1e-5, 1e-6))
        plans: list[StepPlan] = []
        flight: deque[Planned] = deque()
        inputs, now = deque(self.inputs), 0
        last: Planned | None = None
        while inputs or not scheduler.is_idle:
            if scheduler.is_idle:
                now = max(now, inputs[0][0])
            while inputs and inputs[0][0] <= now:
                _, given_input = inputs.popleft()
                last = None
                if isinstance(given_input, str):
                    scheduler.abort(given_input)
                else:
                    scheduler.add(given_input)
            if with_jumps and last is not None:
                count = steady_steps(scheduler, last)
                if inputs:
                    count = min(count, inputs[0][0] - now)
                count = min([count, *(self.before_stop(request) for request in scheduler.running)])
                if count > 0:
                    done = jump(scheduler, last, count, self.next_tokens)
                    plans += self.expanded(plans[-1], done)
                    now += done.num_steps
                    self.tally["jumps"] += 1
                    self.tally["jumped"] += done.num_steps
                    self.tally["grown"] += len(done.growths)
                    self.tally["cut short"] += done.num_steps < count
                    self.tally[f"head waits for {last.head_waits_for}"] += done.num_steps > 0
                    if done.num_steps:
                        continue
            last = planned = scheduler.plan()
            now += 1
            if not planned.is_empty:
                plans.append(planned.plan)
                flight.append(planned)
                self.tally["steps"] += 1
            for _ in range(max(len(flight) - self.depth, int(planned.is_empty and bool(flight)))):
                self.commit(scheduler, flight.popleft())
        self.tally["preemptions"] += scheduler.num_preemptions
        pool = cache.pool
        state = [
            pool.refs, pool.keys, [*pool.index.items()], [*pool.blank], [*pool.cached], pool.generations,
            cache.hit_tokens, scheduler.num_steps, scheduler.num_preemptions, now,
        ]  # fmt: skip
        return plans, state

    def commit(self, scheduler: Scheduler, planned: Planned) -> None:
        tokens = [
            self.token(request, len(request.tokens))
            for request, samples in zip(planned.requests, planned.plan.samples, strict=True)
            if samples
        ]
        scheduler.commit(planned.plan, StepResult(planned.plan.step, tokens))

    def expanded(self, before: StepPlan, done: Jump) -> list[StepPlan]:
        """The plans that a jump stands for."""
        plans = []
        for step in range(done.num_steps):
            grown = [growth for growth in done.growths if growth.step == step]
            plans.append(
                StepPlan(
                    before.step + 1 + step,
                    [],
                    [],
                    [],
                    before.rows,
                    [start + 1 + step for start in before.starts],
                    before.counts,
                    before.samples,
                    [growth.row for growth in grown],
                    [growth.entry for growth in grown],
                    [growth.page for growth in grown],
                )
            )
        return plans

    def check(self) -> Counter[str]:
        plans, state = self.run(with_jumps=False)
        jumped_plans, jumped_state = self.run(with_jumps=True)
        for without, with_jumps in zip(plans, jumped_plans, strict=True):
            assert without == with_jumps, f"seed {self.seed}"
        assert state == jumped_state, f"seed {self.seed}"
        return self.tally


@pytest.mark.parametrize("has_windows", [False, True], ids=["one group", "windows"])
def test_seeded_workloads_have_the_same_plans_with_jumps(has_windows):
    total: Counter[str] = Counter()
    for seed in range(150):
        total.update(Case(seed, has_windows).check())
    assert total["jumped"] > total["steps"] / 20 and total["jumps"] > 150, total
    assert total["preemptions"] > 40 and total["head waits for rows"] > 20, total
    if not has_windows:
        assert total["grown"] > 150 and total["cut short"] > 8 and total["head waits for pages"] > 8, total


@given(seed=st.integers(10**6, 10**9), has_windows=st.booleans())
@settings(max_examples=60, deadline=None)
def test_plans_with_jumps_equal_plans_without(seed, has_windows):
    Case(seed, has_windows).check()


def test_a_jump_stops_where_the_head_of_the_queue_could_share_a_page():
    """The head lacks one page. A running row samples what the head's prompt has there: with that page it fits, one step later."""
    cache = KVCache(10, 4)
    scheduler = Scheduler(cache, 4, 64)
    scheduler.add(GenerateRequest("long", [0] * 8, SamplingParams(seed=0, max_tokens=24), []))
    scheduler.add(GenerateRequest("other", [1] * 15, SamplingParams(seed=0, max_tokens=9), []))
    for _ in range(2):
        last = scheduler.plan()
        scheduler.commit(last.plan, StepResult(0, [0] * len(last.plan.rows)))
    scheduler.add(GenerateRequest("head", [0] * 21, SamplingParams(seed=0, max_tokens=2), []))
    last = scheduler.plan()
    scheduler.commit(last.plan, StepResult(0, [0] * len(last.plan.rows)))
    assert last.head_waits_for == "pages"
    done = jump(scheduler, last, steady_steps(scheduler, last), lambda request, count: [0] * count)
    first = scheduler.running[0]
    assert done.num_steps > 0 and first.computed % 4 == 0, "it stops with a page that was just published"
