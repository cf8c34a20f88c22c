"""First come, first served, as a bound: no response is overtaken, and its primary is admitted once the work before it can be done.

The bounds are those of octavo/schedule/policy.py, in steps of the loop. They count older primaries, one for each response that is open
when a sequence becomes primary, however many sequences those have. Of an older primary: `longest` is what it will hold at most (prompt
and max_tokens), `open` what it may still sample, `uncomputed` what of `longest` has no keys and values yet. `budget` is what a step
may compute, `depth` how many plans are in flight while the next is made. Where steps beside streams have a limit, `budget` is what
they compute of the oldest prompt at least (MIN_PROMPT_TOKENS), if that is less.

one after the other   Σ (2 ⌈longest / budget⌉ + open + depth + 2) + 1: whatever happens, with pages for one request only
all at once           ⌊Σ uncomputed / budget⌋ + max open + depth + 3: of the queue's head, if older ones do not lack pages meanwhile

Both hold for prompts of which a vector is wanted and that must be computed whole, in one step. They need all of a step's budget
at worst, so all older primaries may have to end before them; they pass none by, and none passes them."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache, audit
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams, StepResult
from octavo.schedule import Scheduler
from octavo.schedule.request import Request
from octavo.schedule.stall_limit import MIN_PROMPT_TOKENS, StallLimit
from octavo.schedule.step_costs import StepCosts

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
    num_prompts: int = 1  # alike, parts of one response


ASKED = st.builds(
    Asked,
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(1, 16),
    st.sampled_from([1, 1, 2, 3, 9]),
    st.integers(1, 40),
    st.sampled_from([0, 0, 0, 3, 15]),
    st.sampled_from([False, False, True]),
    st.sampled_from([1, 1, 1, 2, 5]),
)


@dataclass
class Queue:
    """Responses through a scheduler, step by step; every primary is watched from when it waits until it is admitted."""

    rows: int
    budget: int
    num_pages: int
    num_host_pages: int
    depth: int
    is_limited: bool = False  # to the least beside streams: steps take longer than they may anyway
    now: int = 0  # steps so far
    closest: int = 1000  # steps that were left to a primary when it was admitted
    num_waits: int = 0
    num_whole_waits: int = 0  # of them: prompts that must be computed whole, for want of budget
    num_ways: int = 0  # steps in which a primary was admitted in the place of younger sequences
    heads: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence → (since, bound)

    def __post_init__(self) -> None:
        cache = KVCache(self.num_pages, PAGE_SIZE, self.num_host_pages)
        self.scheduler = Scheduler(cache, self.rows, self.budget)
        self.least = self.budget  # tokens that a step computes, unless it advances all
        if self.is_limited:
            self.scheduler.stall_limit, self.least = StallLimit(0.001), min(self.budget, MIN_PROMPT_TOKENS)
            self.scheduler.learn(StepCosts(0.0, 1.0, 1.0, 1.0, 1.0))
        self.num_capped = 0
        self.primaries: dict[int, tuple[int, int]] = {}  # primaries that wait: sequence → (since, bound)
        self.stops: dict[str, int] = {}
        self.flight: deque = deque()

    def add(self, name: str, asked: Asked) -> None:
        for part in range(asked.num_prompts):
            prompt = [1] * asked.shared + [10 + (31 * len(self.stops) + i) % 97 for i in range(asked.own)]
            params = SamplingParams(n=asked.n, seed=1, max_tokens=asked.max_tokens)
            source = GenerateRequest(f"{name}-{part}", prompt, params, [STOP], response_id=name)
            if asked.needs_one_step and len(prompt) <= self.budget:
                params = SamplingParams(seed=1, max_tokens=1)
                source = msgspec.structs.replace(
                    source, params=params, stop_ids=[], pooling=PoolingParams("last"), needs_one_step=True
                )
            self.scheduler.add(source)
            self.stops[source.id] = asked.stops_after
        self._note_leads()

    def abort(self, name: str) -> None:
        for request in {each.id: each for each in self.scheduler.requests() if each.response_id == name}.values():
            for choice in self.scheduler.choices(request.id):
                self.primaries.pop(choice.sequence, None)
            self.scheduler.abort(request.id)
        self._note_leads()

    def step(self) -> None:
        scheduler = self.scheduler
        self._note_head()
        planned = scheduler.plan()
        plan = planned.plan
        self.num_capped += planned.capped is not None
        for request in planned.admitted:
            self._admitted(request)
        if planned.returned:
            self.num_ways += bool(planned.admitted)
            if not planned.admitted:  # for want of pages
                self.heads.clear()
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
        self._note_leads()
        waiting = min((request.order for request in scheduler.waiting), default=(1, 0, 0, 0))
        assert all(request.gives_way or request.order < waiting for request in scheduler.running), "overtaken"
        for since, bound in self.primaries.values():
            assert self.now - since <= bound, "waits longer than all older primaries could take one after the other"
        for sequence, (since, bound) in self.heads.items():
            if sequence in self.primaries:
                assert self.now - since <= bound, (
                    "the head waits longer than older primaries that run could take together"
                )
        assert not audit(scheduler.cache)

    def _token(self, request: Request) -> int:
        return STOP if request.length - request.prompt_len >= self.stops[request.id] else 7

    def _alone(self, older: Request) -> int:
        return 2 * -(-older.max_len // self.least) + older.max_len - len(older.tokens) + self.depth + 2

    def _older(self, primary: Request) -> list[Request]:
        """One sequence of each response that comes before it."""
        older = [
            request for request in self.scheduler.requests() if request.is_primary and request.order < primary.order
        ]
        assert len({request.response_id for request in older}) == len(older)
        return older

    def _note_leads(self) -> None:
        """Primaries that wait from now on: new ones, those that just became primary, and those that were preempted."""
        for request in self.scheduler.waiting:
            if request.is_primary and request.sequence not in self.primaries:
                bound = sum(self._alone(older) for older in self._older(request)) + 1
                self.primaries[request.sequence] = (self.now, bound)

    def _note_head(self) -> None:
        head = self.scheduler.waiting.head()
        if head is None or not head.is_primary or head.sequence in self.heads:
            return
        older = self._older(head)
        assert all(request.row >= 0 for request in older)
        uncomputed = sum(request.max_len - request.computed for request in older)
        most_open = max((request.max_len - len(request.tokens) for request in older), default=0)
        bound = uncomputed // self.least + most_open + self.depth + 3
        self.heads[head.sequence] = (self.now, bound)

    def _admitted(self, request: Request) -> None:
        if not request.is_primary:
            assert not self.primaries, "a primary waits"
            return
        since, _ = self.primaries.pop(request.sequence)
        assert all(request.order < self._request(other).order for other in self.primaries), "overtaken"
        if self.now > since:
            self.num_waits += 1
            self.num_whole_waits += request.needs_one_step
            since, bound = self.heads.get(request.sequence, (0, 1000))
            self.closest = min(self.closest, bound - (self.now - since))
        self.heads.pop(request.sequence, None)

    def _request(self, sequence: int) -> Request:
        return next(request for request in self.scheduler.requests() if request.sequence == sequence)

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
                if when == self.now:
                    self.abort(name)
            self.step()
            assert self.now < 20_000, "livelock"
        assert not self.primaries and not audit(self.scheduler.cache, is_idle=True)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([0, 0, 2, 10]),
    st.sampled_from([0, 12]),
    st.integers(0, 1),
    st.booleans(),
    st.lists(ASKED, min_size=2, max_size=12),
)
def test_every_lead_is_admitted_in_time(rows, budget, more_pages, num_host_pages, depth, is_limited, asked):
    Queue(rows, budget, LONGEST // PAGE_SIZE + more_pages, num_host_pages, depth, is_limited).run(asked)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_limit_beside_streams_delays_and_starves_none(depth):
    """The harshest one: each step computes the least of the oldest prompt, and streams never end before it is done."""
    queue = Queue(5, 32, 200, 0, depth, is_limited=True)
    stream = Asked(0, 0, 4, 36, 1, 99, 0)
    queue.run([stream, *(Asked(4, 0, 24, 8, 1, 99, 0) for _ in range(12))])
    assert queue.num_capped > 5 and queue.num_waits > 5 and queue.closest >= 0


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
def test_a_prompt_that_takes_a_whole_step_waits_for_older_leads_and_for_no_one_else(depth):
    """As many tokens as a step may compute, so it enters when none of them runs; all that came later stay behind it."""
    queue = Queue(5, 24, LONGEST // PAGE_SIZE + 90, 0, depth)
    later = [Asked(step, 0, 4, 16, 1, 99, 0) for step in range(2, 20)]
    queue.run([Asked(0, 0, 20, 16, 1, 99, 0), Asked(1, 0, 24, 1, 1, 99, 0, needs_one_step=True), *later])
    assert queue.num_whole_waits == 1 and 0 <= queue.closest <= 6, queue.closest


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_prompts", "n"), [(64, 1), (1, 64), (8, 8)])
@pytest.mark.parametrize("more_pages", [6, 500])
def test_a_response_of_many_sequences_keeps_no_other_waiting(depth, num_prompts, n, more_pages):
    """All rows, and with few pages all of these, are taken by sequences that have many tokens to come. A bystander's single token
    comes at once, again and again."""
    queue = Queue(5, 8, LONGEST // PAGE_SIZE + more_pages, 0, depth)
    queue.add("large", Asked(0, 0, 4, LONGEST - 4, n, 10**6, 0, num_prompts=num_prompts))
    for _ in range(12):
        queue.step()
    scheduler = queue.scheduler
    assert len(scheduler.running) == 5 if more_pages > 6 else scheduler.cache.pool.num_free < 5
    for number in range(20):
        queue.add(f"small{number}", Asked(0, 0, 4, 1, 1, 99, 0))
        num_steps = 0
        while queue.scheduler.has(f"small{number}-0"):
            queue.step()
            num_steps += 1
        # None enters in a step in which an older primary runs out of pages.
        assert num_steps <= 2 + depth + (4 if more_pages == 6 else 0), num_steps
    queue.run([])
    assert queue.num_ways > 0


def test_a_response_of_many_sequences_goes_on_beside_an_endless_stream_of_others():
    """The server is always full: each of its sequences waits for one place in the queue after another, and none starves."""
    queue = Queue(2, 8, 1000, 0, 1)
    queue.add("large", Asked(0, 0, 4, 4, 4, 99, 0, num_prompts=2))
    number = 0
    while any(request.response_id == "large" for request in queue.scheduler.requests()):
        while len(queue.scheduler.waiting) < 12:
            queue.add(f"small{number}", Asked(0, 0, 4, 4, 1, 99, 0))
            number += 1
        queue.step()
        assert queue.now < 5000
    # Eight sequences, each behind the primaries that wait: about a dozen of others between two of them.
    assert 8 * 4 <= number <= 8 * 24, number


def test_further_sequences_take_turns_between_responses():
    scheduler = Scheduler(KVCache(100, 4), max_rows=1, max_step_tokens=100)
    for name in "ab":
        for part in range(3):
            params = SamplingParams(max_tokens=1, seed=0, n=2 if part == 0 else 1)
            source = GenerateRequest(f"{name}{part}", [ord(name), part], params, [], response_id=name)
            scheduler.add(source)
    order = []
    while not scheduler.is_idle:
        planned = scheduler.plan()
        order += [f"{request.id}[{request.index}]" for request in planned.requests]
        scheduler.commit(planned.plan, StepResult(planned.plan.step, [7] * sum(planned.plan.samples)))
    assert order == ["a0[0]", "b0[0]", "a0[1]", "b0[1]", "a1[0]", "b1[0]", "a2[0]", "b2[0]"]
