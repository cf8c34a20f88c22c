"""A fleet on a virtual clock: real schedulers with real caches and feeds, a real router, modelled step times."""

import heapq
import time
from typing import NamedTuple

from benchmarks.cluster.approximate import ApproximateTree
from octavo.cache import KVCache
from octavo.messages import GenerateRequest, SamplingParams, StepPlan, StepResult, TokenDelta
from octavo.observe.replica_feed import ReplicaFeed
from octavo.observe.step_observer import Observers
from octavo.routing import Router
from octavo.routing.policy import Policy
from octavo.schedule import Scheduler
from octavo.schedule.results import Planned

ROOT = b"root of the keys"


class StepCost(NamedTuple):
    """Seconds of a step: a constant, plus so much for each row, plus so much for each token beyond one a row."""

    step: float
    row: float
    token: float

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        return self.step + self.row * num_rows + self.token * (num_tokens - num_rows)


class FleetSettings(NamedTuple):
    num_replicas: int
    num_pages: int  # of each replica
    page_size: int
    max_rows: int
    max_step_tokens: int
    cost: StepCost
    saturation: float


class Arrival(NamedTuple):
    seconds: float
    name: str
    prompt: list[int]
    num_output: int


class FleetResult(NamedTuple):
    queried_tokens: int
    hit_tokens: int
    first_seconds: list[float]  # from arrival to the first token, of every request
    num_requests: list[int]  # of each replica
    preemptions: int
    seconds: float  # from the first arrival to the last token
    routing_seconds: float  # of CPU time, in the router


class Replica:
    """One step after another, each as long as the model says."""

    def __init__(self, number: int, settings: FleetSettings) -> None:
        cache = KVCache(settings.num_pages, settings.page_size, root=ROOT)
        self.scheduler = Scheduler(cache, settings.max_rows, settings.max_step_tokens)
        self.now = 0.0
        self.feed = ReplicaFeed(self.scheduler, number, 1)
        self.observers = Observers([self.feed], lambda: self.now)
        self.under_way: Planned | None = None
        self.num_requests = 0
        self._cost = settings.cost

    def add(self, request: GenerateRequest, now: float) -> None:
        self.now = max(self.now, now)
        self.num_requests += 1
        self.scheduler.add(request)
        self.observers.arrived(request, False)

    def begin_step(self) -> float | None:
        """Plan a step. Returns when it will be over; None: there is nothing to do."""
        while self.scheduler.has_work:
            self.observers.began()
            planned = self.scheduler.plan()
            self.observers.planned(planned)
            if not planned.is_empty:
                self.under_way = planned
                return self.now + self._cost.seconds(len(planned.plan.rows), planned.num_tokens)
            assert planned.returned, "work is there, and nothing advances"
        return None

    def end_step(self, now: float) -> list[TokenDelta]:
        """Take in the step's result. Returns the tokens of requests."""
        planned, self.under_way, self.now = self.under_way, None, now
        assert planned is not None
        plan: StepPlan = planned.plan
        self.observers.collected()
        committed = self.scheduler.commit(plan, StepResult(plan.step, [1] * sum(plan.samples)))
        self.observers.committed(committed)
        return committed.deltas


def run_fleet(
    arrivals: list[Arrival], settings: FleetSettings, policy: Policy, other: ApproximateTree | None = None
) -> FleetResult:
    """`other`: chooses in place of the policy."""
    router = Router(ROOT, settings.page_size, policy, settings.saturation)
    replicas = [Replica(number, settings) for number in range(settings.num_replicas)]
    for number in range(settings.num_replicas):
        router.join(number, 1)
    ends: list[tuple[float, int]] = []  # of the steps under way
    waiting: dict[str, float] = {}
    first_seconds: list[float] = []
    queue = iter(arrivals)
    arrival = next(queue, None)
    began, routing, now = (0.0 if arrival is None else arrival.seconds), 0.0, 0.0

    def take_events(replica: Replica) -> None:
        nonlocal routing
        events, start = replica.feed.take(), time.process_time()
        router.take_events(events)
        routing += time.process_time() - start

    while arrival is not None or ends:
        if arrival is not None and (not ends or arrival.seconds <= ends[0][0]):
            start = time.process_time()
            among = None if other is None else [other.choose(arrival.name, arrival.prompt)]
            choice = router.route(arrival.name, arrival.prompt, among)
            routing += time.process_time() - start
            assert choice is not None
            params = SamplingParams(max_tokens=arrival.num_output, seed=0, ignore_eos=True)
            request = GenerateRequest(arrival.name, arrival.prompt, params, [], num_expected=choice.num_held)
            replica, now = replicas[choice.replica], arrival.seconds
            replica.add(request, now)
            waiting[arrival.name] = now
            number = choice.replica
            arrival = next(queue, None)
        else:
            now, number = heapq.heappop(ends)
            replica = replicas[number]
            for delta in replica.end_step(now):
                name = delta.request_id
                if (since := waiting.pop(name, None)) is not None:
                    first_seconds.append(now - since)
                    router.settle(name)
                if delta.finish is not None and other is not None:
                    other.ended(name)
            take_events(replica)
        if replica.under_way is None and (end := replica.begin_step()) is not None:
            heapq.heappush(ends, (end, number))
            take_events(replica)  # pages are published when their step is planned
    assert not waiting and not router.index.incomplete
    caches = [replica.scheduler.cache for replica in replicas]
    return FleetResult(
        sum(cache.queried_tokens for cache in caches),
        sum(cache.hit_tokens for cache in caches),
        first_seconds,
        [replica.num_requests for replica in replicas],
        sum(replica.scheduler.num_preemptions for replica in replicas),
        now - began,
        routing,
    )
