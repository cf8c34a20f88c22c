"""First come, first served, as a bound: nobody is overtaken, and whoever waits is let in once the work before it can be done.

The bounds are those of octavo/schedule/policy.py, in steps of the loop. Of a choice that was there before: `longest` is what it
will hold at most (prompt and max_tokens), `open` what it may still sample, `uncomputed` what of `longest` has no keys and values
yet. `budget` is what a step may compute, `depth` how many plans are in flight while the next is made.

one after the other   Σ (2 ⌈longest / budget⌉ + open + depth + 2) + 1: whatever happens, with pages for one request only
all at once           ⌊Σ uncomputed / budget⌋ + max open + depth + 3: of the queue's head, if nobody is preempted meanwhile

Both hold for prompts of which a vector is wanted and that must be computed whole, in one step. They need all of a step's budget
at worst, so all who run may have to end before them; they pass nobody by, and nobody passes them."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache, audit
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams, StepResult
from octavo.schedule import Scheduler
from octavo.schedule.request import Request

PAGE_SIZE, LONGEST = 4, 40
STOP = 9


@dataclass
class Asked:
    arrives: int  # in this step, or when the ones before it have come
    shared: int  # leading tokens that all have in common
    own: int  # tokens after these
    max_tokens: int
    n: int
    stops_after: int  # tokens: then the model ends it
    leaves_after: int  # steps; 0: its client stays
    needs_one_step: bool = False  # a vector of its prompt is wanted, computed in one step; where a step has room for it


ASKED = st.builds(
    Asked,
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([0, 0, 0, 3, 15]),
    st.sampled_from([False, False, True]),
)


@dataclass
class Queue:
    """Requests through a scheduler, step by step, each watched until it is let in."""

    rows: int
    budget: int
    num_pages: int
    num_host_pages: int
    depth: int
    now: int = 0  # steps so far
    closest: int = 1000  # steps that were left to somebody when it was let in
    num_waits: int = 0
    num_whole_waits: int = 0  # of them: prompts that must be computed whole, for want of budget
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # sequence → (since, bound, preemptions then)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(KVCache(self.num_pages, PAGE_SIZE, self.num_host_pages), self.rows, self.budget)
        self.untouched: dict[int, tuple[int, int]] = {}  # sequence → (since, bound); never let in, in order of arrival
        self.stops: dict[str, int] = {}
        self.flight: deque = deque()

    def add(self, name: str, asked: Asked) -> None:
        prompt = [1] * asked.shared + [10 + (31 * len(self.stops) + i) % 97 for i in range(asked.own)]
        params = SamplingParams(n=min(asked.n, self.rows), seed=1, max_tokens=asked.max_tokens)
        costs = [self._alone(older) for older in self.scheduler.requests()]
        source = GenerateRequest(name, prompt, params, [STOP])
        if asked.needs_one_step and len(prompt) <= self.budget:
            params = SamplingParams(seed=1, max_tokens=1)
            source = GenerateRequest(name, prompt, params, [], pooling=PoolingParams("last"), needs_one_step=True)
        self.scheduler.add(source)
        self.stops[name] = asked.stops_after
        self.untouched[self.scheduler.choices(name)[0].sequence] = (self.now, sum(costs) + 1)

    def step(self) -> None:
        scheduler = self.scheduler
        self._note_head()
        planned = scheduler.plan()
        plan = planned.plan
        for request in planned.admitted:
            self._let_in(request)
        if not plan.is_empty:
            issued = zip(planned.requests, plan.samples, plan.starts, plan.counts, strict=True)
            sampling = [(request, start, count) for request, samples, start, count in issued if samples]
            whole = [(start, count, request.prompt_len) for request, start, count in sampling if request.needs_one_step]
            assert all(start == 0 and count == prompt_len for start, count, prompt_len in whole), "computed in pieces"
            tokens = [self._token(request) for request, _, _ in sampling if not request.needs_one_step]
            self.flight.append((plan, StepResult(plan.step, tokens, [b"vector"] * len(whole))))
        while len(self.flight) > self.depth or (self.flight and plan.is_empty):
            scheduler.commit(*self.flight.popleft())
        self.now += 1
        running = [request.sequence for request in scheduler.running]
        waiting = [request.sequence for request in scheduler.waiting._waiting.values()]
        assert not running or not waiting or max(running) < min(waiting), "overtaken"
        for since, bound in self.untouched.values():
            assert self.now - since <= bound, "waits longer than all before it could take one after the other"
        for sequence, (since, bound, preemptions) in self.heads.items():
            if sequence in self.untouched and scheduler.num_preemptions == preemptions:
                assert self.now - since <= bound, "the head waits longer than those who run could take together"
        assert not audit(scheduler.cache)

    def _token(self, request: Request) -> int:
        return STOP if request.length - request.prompt_len >= self.stops[request.id] else 7

    def _alone(self, older: Request) -> int:
        return 2 * -(-older.max_len // self.budget) + older.max_len - len(older.tokens) + self.depth + 2

    def _note_head(self) -> None:
        head, scheduler = self.scheduler.waiting.head(), self.scheduler
        if head is None or head.sequence in self.heads or head.sequence not in self.untouched:
            return
        before = [request for request in scheduler.requests() if request.sequence < head.sequence]
        if any(request.row < 0 for request in before):
            return  # a choice that was left by its leader
        uncomputed = sum(
            older.max_len - max(older.computed, older.prompt_len if older.index else 0) for older in before
        )
        most_open = max((older.max_len - len(older.tokens) for older in before), default=0)
        bound = uncomputed // self.budget + most_open + self.depth + 3
        self.heads[head.sequence] = (self.now, bound, scheduler.num_preemptions)

    def _let_in(self, request: Request) -> None:
        if request.sequence not in self.untouched:
            return  # it was in before, or came from one that was
        assert request.sequence == min(self.untouched), "overtaken"
        since, _ = self.untouched.pop(request.sequence)
        if self.now > since:
            self.num_waits += 1
            self.num_whole_waits += request.needs_one_step
            since, bound, _ = self.heads.get(request.sequence, (0, 1000, 0))
            self.closest = min(self.closest, bound - (self.now - since))

    def run(self, asked: list[Asked]) -> None:
        asked = sorted(asked, key=lambda each: each.arrives)
        leaving: list[tuple[int, str]] = []
        while asked or not self.scheduler.is_idle or self.flight:
            while asked and asked[0].arrives <= self.now:
                each, name = asked.pop(0), f"r{len(self.stops)}"
                self.add(name, each)
                if each.leaves_after:
                    leaving.append((self.now + each.leaves_after, name))
            for when, name in leaving:
                if when == self.now and (choices := self.scheduler.choices(name)):
                    for choice in choices:
                        self.untouched.pop(choice.sequence, None)
                    self.scheduler.abort(name)
            self.step()
        assert not self.untouched and not audit(self.scheduler.cache, is_idle=True)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([0, 0, 2, 10]),
    st.sampled_from([0, 12]),
    st.integers(0, 1),
    st.lists(ASKED, min_size=2, max_size=12),
)
def test_whoever_waits_is_let_in_in_time(rows, budget, more_pages, num_host_pages, depth, asked):
    Queue(rows, budget, LONGEST // PAGE_SIZE + more_pages, num_host_pages, depth).run(asked)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_bound_is_near(depth):
    """Rows, pages or budget: the head waits about as long as it says."""
    for rows, budget, more_pages in ((1, 8, 90), (5, 8, 0), (5, 1, 90)):
        queue = Queue(rows, budget, LONGEST // PAGE_SIZE + more_pages, 0, depth)
        queue.run([Asked(0, 0, 20, 16, 1, 99, 0), Asked(1, 0, 24, 4, 1, 99, 0)])
        assert queue.num_waits == 1 and 0 <= queue.closest <= 22, queue.closest
        if budget > 1:
            assert queue.closest <= 6, queue.closest


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_takes_a_whole_step_waits_for_those_who_run_and_for_no_one_else(depth):
    """As many tokens as a step may compute, so it enters when nobody runs; all that came later stay behind it."""
    queue = Queue(5, 24, LONGEST // PAGE_SIZE + 90, 0, depth)
    later = [Asked(step, 0, 4, 16, 1, 99, 0) for step in range(2, 20)]
    queue.run([Asked(0, 0, 20, 16, 1, 99, 0), Asked(1, 0, 24, 1, 1, 99, 0, needs_one_step=True), *later])
    assert queue.num_whole_waits == 1 and 0 <= queue.closest <= 6, queue.closest
