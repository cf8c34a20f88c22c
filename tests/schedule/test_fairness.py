"""Fairness between tenants: the bounds of octavo/schedule/fairness.py, with random requests, and what they are for.

The test keeps its own account of what was computed for each tenant, from the plans alone."""

import itertools
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from math import fsum

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache, audit
from octavo.messages import GenerateRequest, SamplingParams, StepResult
from octavo.schedule import Fairness, Scheduler
from octavo.schedule import fairness as fairness_module
from octavo.schedule.fairness import CREDIT_STEPS, UNIT
from octavo.schedule.request import SCORED_COST, Request
from octavo.schedule.results import Planned
from tests.schedule import workload as workload_module
from tests.schedule.workload import Workload

PAGE_SIZE = 4


def test_two_hundred_workloads_of_several_tenants():
    """Whatever the order of tenants does to rows and pages: every token is what it is alone, and nothing is lost."""
    total: Counter[str] = Counter()
    for seed in range(200):
        options = {"has_windows": seed % 3 == 0, "has_beams": seed % 4 == 0, "has_responses": seed % 5 == 0}
        options |= {"is_mortal": seed % 7 == 0, "has_limit": seed % 2 == 0, "has_drafts": seed % 6 == 1}
        options |= {"has_late": seed % 8 == 3, "num_stages": 2 if seed % 9 == 0 else 1}
        try:
            total.update(asdict(Workload(seed, has_tenants=True, **options).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("preemptions", "swaps", "copies", "forks", "hits", "aborts", "vectors", "made_way", "beams", "late"):
        assert total[what] > 10, (what, total)


@dataclass
class Asked:
    tenant: int
    arrives: int
    shared: int  # leading tokens that all have in common
    own: int
    max_tokens: int
    n: int = 1


ASKED = st.builds(
    Asked,
    st.integers(0, 2),
    st.integers(0, 40),
    st.sampled_from([0, 0, 8]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([1, 1, 1, 3]),
)


@dataclass
class Shared:
    """Several tenants through one scheduler, with an account of what was computed for each."""

    rows: int
    budget: int
    num_pages: int
    weights: tuple[float, ...]
    depth: int = 0
    is_fair: bool = True
    now: int = 0
    first_plans: dict[str, int] = field(default_factory=dict)  # request → steps until its first plan
    first_tokens: dict[str, int] = field(default_factory=dict)
    num_preempted: int = 0

    def __post_init__(self) -> None:
        fairness = Fairness(self.rows, self.budget) if self.is_fair else None
        self.scheduler = Scheduler(KVCache(self.num_pages, PAGE_SIZE), self.rows, self.budget, fairness=fairness)
        self.service = Counter[int]()
        self.furthest: dict[int, int] = {}  # sequence → tokens that were counted
        self.largest = 0  # service of one request
        self.flight: deque = deque()
        self.arrived: dict[str, int] = {}
        # (two tenants) → their service when both began to wait; they have been waiting ever since.
        self.since: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, asked: Asked, name: str = "") -> str:
        name = name or f"{asked.tenant}-{len(self.arrived)}"
        prompt = [1] * asked.shared + [10 + (31 * len(self.arrived) + i) % 97 for i in range(asked.own)]
        params = SamplingParams(n=asked.n, seed=1, max_tokens=asked.max_tokens)
        weight = self.weights[asked.tenant]
        self.largest = max(self.largest, len(prompt) + 2 * asked.max_tokens)
        self.scheduler.add(GenerateRequest(name, prompt, params, [], tenant=asked.tenant, weight=weight))
        self.arrived[name] = self.now
        return name

    def step(self) -> None:
        scheduler = self.scheduler
        self._note_pairs()
        planned = scheduler.plan()
        plan = planned.plan
        self.num_preempted += len(planned.returned)
        for request, start, count, samples in zip(
            planned.requests, plan.starts, plan.counts, plan.samples, strict=True
        ):
            self._count(request, start, start + count, samples)
        if len(scheduler.waiting):  # work-conserving: one waits, so it lacks something, or has just been preempted
            assert planned.head_waits_for is not None or planned.returned or planned.queued, "rests while one waits"
        if not plan.is_empty:
            self.flight.append((plan, StepResult(plan.step, [7] * sum(plan.samples))))
        while len(self.flight) > self.depth or (self.flight and plan.is_empty):
            for delta in scheduler.commit(*self.flight.popleft()).deltas:
                if delta.token_ids:
                    self.first_tokens.setdefault(delta.request_id, self.now - self.arrived[delta.request_id] + 1)
        self.now += 1
        self._check()
        assert not audit(scheduler.cache)

    def _count(self, request: Request, start: int, end: int, samples: bool) -> None:
        tenant = int(request.id.partition("-")[0])
        counted = max(start, self.furthest.get(request.sequence, 0))
        if end > counted:
            self.service[tenant] += end - counted + samples
            self.furthest[request.sequence] = end

    def _note_pairs(self) -> None:
        waiting = {int(request.id.partition("-")[0]) for request in self.scheduler.waiting}
        pairs = set(itertools.combinations(sorted(waiting), 2))
        self.since = {pair: at for pair, at in self.since.items() if pair in pairs}
        for pair in pairs - self.since.keys():
            self.since[pair] = (self.service[pair[0]], self.service[pair[1]])

    @property
    def bound(self) -> float:
        """Of the service, by weight, that one tenant is ahead of another that waits."""
        return self.rows * self.largest / min(self.weights) + CREDIT_STEPS * self.budget

    def _check(self) -> None:
        fairness = self.scheduler.fairness
        if fairness is None:
            return
        most = self.rows * self.largest / min(self.weights) * UNIT * 1.001
        for tenant in fairness.known.values():
            assert tenant.counter <= fairness.virtual_time + most, "served beyond its rows"
            if tenant.queue is not None:
                assert tenant.counter >= fairness.virtual_time - fairness.credit, "claims the past"
        for (one, other), (one_at, other_at) in self.since.items():
            gained = (self.service[one] - one_at) / self.weights[one]
            other_gained = (self.service[other] - other_at) / self.weights[other]
            assert abs(gained - other_gained) <= 2 * self.bound, "two that wait drift apart"

    def run(self, asked: list[Asked]) -> None:
        asked = sorted(asked, key=lambda each: each.arrives)
        while asked or not self.scheduler.is_idle or self.flight:
            while asked and asked[0].arrives <= self.now:
                self.add(asked.pop(0))
            self.step()
            assert self.now < 20_000, "livelock"
        assert not audit(self.scheduler.cache, is_idle=True)
        if self.scheduler.fairness is not None:
            assert not any(each.num_open for each in self.scheduler.fairness.known.values()), "tenants leaked"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([0, 2, 60]),
    st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 4.0])] * 3),
    st.integers(0, 1),
    st.lists(ASKED, min_size=2, max_size=25),
)
def test_tenants_that_wait_get_their_shares(rows, budget, more_pages, weights, depth, asked):
    Shared(rows, budget, 8 + more_pages, weights, depth).run(asked)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), (0.5, 4.0, 1.0)])
def test_shares_follow_the_weights_however_many_requests_wait(weights, depth):
    """Unequal requests: one tenant's prompts are long, another's answers, and one asks for several choices. All three are behind for the
    whole time: shares are within three percent, or two requests."""
    shared = Shared(8, 16, 400, weights, depth)
    kinds = [Asked(0, 0, 0, 30, 2), Asked(1, 0, 0, 2, 16), Asked(2, 0, 0, 4, 6, n=3)]
    for _ in range(400):
        for kind in kinds:
            shared.add(kind)
    for _ in range(800):
        shared.step()
    assert {request.tenant.number for request in shared.scheduler.waiting} == {0, 1, 2}
    total = sum(shared.service.values())
    for tenant, weight in enumerate(weights):
        want = total * weight / sum(weights)
        assert abs(shared.service[tenant] - want) <= max(0.03 * want, 2 * shared.largest), (shared.service, weights)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_flood", [8, 64, 640])
def test_a_flood_keeps_no_other_tenant_waiting(num_flood, depth):
    """Rows are all taken by requests that end much later. A light tenant's first token comes after as many steps as alone, and at most
    three more; so it does however large the flood is."""
    shared = Shared(8, 16, 900, (1.0, 1.0), depth)
    for _ in range(num_flood):
        shared.add(Asked(0, 0, 0, 24, 200))
    for _ in range(30):
        shared.step()
    assert len(shared.scheduler.running) == 8
    names = []
    for _ in range(20):
        names.append(shared.add(Asked(1, 0, 0, 24, 4)))
        for _ in range(25):
            shared.step()
    alone = Shared(8, 16, 900, (1.0, 1.0), depth)
    name = alone.add(Asked(1, 0, 0, 24, 4))
    alone.run([])
    waits = [shared.first_tokens.get(each, 10**6) for each in names]
    assert max(waits) <= alone.first_tokens[name] + 3, waits
    assert shared.num_preempted <= len(names), "preempted more often than needed"


def test_without_fairness_the_flood_is_first():
    """The test above can fail."""
    shared = Shared(8, 16, 900, (1.0, 1.0), is_fair=False)
    for _ in range(64):
        shared.add(Asked(0, 0, 0, 24, 200))
    for _ in range(30):
        shared.step()
    name = shared.add(Asked(1, 0, 0, 24, 4))
    for _ in range(100):
        shared.step()
    assert name not in shared.first_tokens


def test_no_step_is_lost():
    """The same requests take as many steps as without fairness, within one percent and the length of one answer."""
    asked = [Asked(at % 3, at // 6, 0, 6 + at % 20, 4 + at % 13) for at in range(600)]
    steps = {}
    for is_fair in (False, True):
        shared = Shared(8, 32, 400, (1.0, 2.0, 4.0), 1, is_fair)
        shared.run(list(asked))
        steps[is_fair] = shared.now
    assert steps[True] <= 1.01 * steps[False] + 17, steps


def test_a_cached_prefix_costs_nothing():
    shared = Shared(1, 64, 100, (1.0, 1.0))
    for _ in range(5):
        shared.add(Asked(0, 0, 40, 4, 1))
        shared.run([])
    fairness = shared.scheduler.fairness
    # The first computes 44 tokens; each of the others the last page of the shared ones at most, and its own four.
    assert fairness.known[0].counter // UNIT == shared.service[0] <= 45 + 4 * (4 + PAGE_SIZE + 1)


def test_requests_of_one_tenant_are_served_in_the_order_of_their_arrival():
    shared = Shared(2, 8, 200, (1.0, 3.0), 1)
    names = [shared.add(Asked(at % 2, 0, 0, 5, 3)) for at in range(24)]
    order: list[str] = []
    while not shared.scheduler.is_idle or shared.flight:
        shared.step()
        order += [name for name in shared.first_tokens if name not in order]
    for tenant in "01":
        assert [name for name in order if name.startswith(tenant)] == [name for name in names if name[0] == tenant]


def test_a_tenant_that_was_away_has_a_credit_and_no_more():
    shared = Shared(1, 8, 100, (1.0, 1.0))
    shared.add(Asked(1, 0, 0, 4, 1))
    shared.run([])
    for _ in range(60):
        shared.add(Asked(0, 0, 0, 8, 8))
    for _ in range(300):
        shared.step()
    before = shared.service.copy()
    for _ in range(60):
        shared.add(Asked(1, 0, 0, 8, 8))
    for _ in range(100):
        shared.step()
    gained = [shared.service[tenant] - before[tenant] for tenant in (0, 1)]
    assert gained[0] > 0 and gained[1] - gained[0] <= CREDIT_STEPS * 8 + 2 * shared.largest, gained


def test_counters_of_tenants_that_have_gone_are_bounded(monkeypatch):
    monkeypatch.setattr(fairness_module, "MAX_KNOWN", 10)
    fairness = Fairness(4, 32)
    scheduler = Scheduler(KVCache(100, PAGE_SIZE), 4, 32, fairness=fairness)
    for tenant in range(200):
        params = SamplingParams(seed=1, max_tokens=2)
        scheduler.add(GenerateRequest(str(tenant), [1, 2, tenant], params, [], tenant=tenant))
        while not scheduler.is_idle:
            plan = scheduler.plan().plan
            scheduler.commit(plan, StepResult(plan.step, [7] * sum(plan.samples)))
    assert len(fairness.known) <= 12


class PlainFairness(Fairness):
    """The same rules, with everything found anew in each plan."""

    def rank_all(self) -> bool:
        tenants = [tenant for tenant in self.known.values() if tenant.num_open]
        self.ordered = sorted(tenants, key=lambda each: (each.counter, each.number))
        for tenant in self.known.values():
            tenant.rank = self.ordered.index(tenant) if tenant in self.ordered else -1
        waiting = [tenant.counter for tenant in self.ordered if tenant.queue is not None]
        self.virtual_time = max([self.virtual_time, *waiting[:1]])
        return True

    def charge(self, planned: Planned) -> None:
        plan = planned.plan
        columns = zip(planned.requests, plan.starts, plan.counts, plan.samples, strict=True)
        for request, start, count, samples in columns:
            end = start + count - request.drafted
            num_new = end - max(start, request.num_charged)
            if num_new > 0:
                request.num_charged = end
                cost = num_new * (SCORED_COST if num_new > 1 and request.lacks_scores else 1)
                request.tenant.counter += (cost + samples) * request.tenant.price

    def charged_until(self, request: Request, end: int) -> int:
        return request.num_charged

    def may_displace(self, head: Request) -> bool:
        return True

    def victims(self, head: Request, running: list[Request]) -> list[Request]:
        own, num_rows = head.tenant, Counter(request.tenant.number for request in running)
        num_own = num_rows[own.number] + 1
        total = fsum(each.weight for each in self.known.values() if each.num_open)
        is_entitled = num_own == 1 or 2 * num_own * total <= self._max_rows * own.weight
        found = []
        for request in running[::-1]:
            other = request.tenant
            if request.order < head.order:
                break
            if other is own and request.gives_way:
                found.append(request)
            if other is not own and is_entitled and (num_rows[other.number] - 1) * own.weight >= num_own * other.weight:
                num_rows[other.number] -= 1
                found.append(request)
        return found[::-1]


def states_of(workload: Workload, monkeypatch: pytest.MonkeyPatch, fairness_type: type[Fairness]) -> list[object]:
    """After each plan of a workload: the plan, all counters, and what each open sequence was charged for."""
    states: list[object] = []

    class Noted(Scheduler):
        def plan(self) -> Planned:
            planned = super().plan()
            fairness = self.fairness
            until = [fairness.charged_until(each, each.computed - each.drafted) for each in self.requests()]
            counters = sorted((each.number, each.counter) for each in fairness.known.values())
            head = None if planned.head is None else planned.head.sequence
            states.append((planned.plan, head, fairness.virtual_time, counters, until))
            return planned

    monkeypatch.setattr(workload_module, "Fairness", fairness_type)
    workload.scheduler_type = Noted
    workload._start_engine()
    workload.run()
    return states


def test_plans_are_those_of_the_plain_rules(monkeypatch):
    """What is kept from plan to plan changes no plan and no counter."""
    assert compare_to_plain(monkeypatch, 60) > 50, "no plan is like the one before"


def compare_to_plain(monkeypatch: pytest.MonkeyPatch, num_seeds: int) -> int:
    """→ how many plans compute the same rows as the one before, a token each."""
    num_steady = 0
    for seed in range(num_seeds):
        options = {"has_windows": seed % 3 == 0, "has_beams": seed % 4 == 0, "has_responses": seed % 5 == 0}
        options |= {"is_mortal": seed % 7 == 0, "has_limit": seed % 2 == 0, "has_drafts": seed % 6 == 1}
        options |= {"has_late": seed % 8 == 3, "num_stages": 2 if seed % 9 == 0 else 1}
        found = [
            states_of(Workload(seed, has_tenants=True, **options), monkeypatch, kind)
            for kind in (Fairness, PlainFairness)
        ]
        assert found[0] == found[1], f"workload seed {seed}"
        plans = [state[0] for state in found[0]]
        num_steady += sum(
            len(one.rows) > 1 and one.rows == other.rows and {*one.counts, *other.counts} == {1}
            for one, other in itertools.pairwise(plans)
        )
    return num_steady


KEPT_FAULTS = {
    "what is lost is forgotten": ("lose", lambda self, request, end: None),
    "a plan after a loss charges as the one before": (
        "lose",
        lambda self, request, end: setattr(request, "num_charged", self.charged_until(request, end)),
    ),
    "the order stays when a counter passes another": ("_has_passed", lambda self: False),
    "none is displaced": ("may_displace", lambda self, head: False),
    "steady plans are not on a request's account": ("charged_until", lambda self, request, end: request.num_charged),
}


@pytest.mark.parametrize("fault", KEPT_FAULTS)
def test_faults_in_what_is_kept_are_caught(fault, monkeypatch):
    name, wrong = KEPT_FAULTS[fault]
    monkeypatch.setattr(Fairness, name, wrong)
    with pytest.raises(AssertionError):
        compare_to_plain(monkeypatch, 20)


def only_prompts(planned: Planned) -> Planned:
    plan = planned.plan
    kept = [at for at, count in enumerate(plan.counts) if count > 1]
    columns = {name: [getattr(plan, name)[at] for at in kept] for name in ("starts", "counts")}
    plan = msgspec.structs.replace(plan, samples=[False] * len(kept), **columns)
    return msgspec.structs.replace(planned, plan=plan, requests=[planned.requests[at] for at in kept])


FAULTS = {
    "nothing is charged": ("charge", lambda self, planned: None),
    "answers are not charged": ("charge", lambda self, planned: CHARGE(self, only_prompts(planned))),
    "weights do not count": ("join", lambda self, request, number, weight: JOIN(self, request, number, 1.0)),
    "the time away is a claim": ("lift", lambda self, tenant: None),
    "no row is given up": ("victims", lambda self, head, running: []),
    "tenants keep their first order": ("rank_all", lambda self: False),
}
CHARGE, JOIN = Fairness.charge, Fairness.join


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(Fairness, name, wrong)
    with pytest.raises(AssertionError):
        test_a_flood_keeps_no_other_tenant_waiting(64, 1)
        test_shares_follow_the_weights_however_many_requests_wait((1.0, 2.0, 4.0), 1)
        test_a_tenant_that_was_away_has_a_credit_and_no_more()
