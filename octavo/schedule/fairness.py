"""Fairness between tenants: who has been served least, in proportion to its weight, goes first (decision 053).

A tenant is what requests have in common that are to share one part of the engine: an API key, as a rule. The scheduler has its number and
its weight; it never sees the key. Every tenant has a counter of the service that it got, divided by its weight, as in VTC (Sheng et al.,
OSDI 2024). Service is what was computed: a token of a prompt counts 1, and SCORED_COST if its logprobs are wanted; a sampled token 1 more. What the
prefix cache had, what is computed again after a preemption, and drafted tokens that were wrong count nothing.

At the beginning of a plan the tenants are ordered by their counters, and all sequences by the order of their tenants; within a tenant the
policy's order holds (policy.py). So the tenant with the lowest counter is admitted first, and its prompts are computed first. They leave room
in the step for rows of other tenants that compute one token, so that a row never rests for a prompt.

A tenant that has nothing in the queue collects no claim: when it comes back, its counter is lifted to the virtual time, less a credit. The
virtual time is the lowest counter among the tenants with requests in the queue, and never falls. The credit lets a tenant that uses
less than its share have a prompt computed at once.

A counter alone would let a flood keep all rows until its requests end. So a tenant that holds less than half of its share of the rows
gets one from a tenant that holds more than its own: the youngest sequence of that tenant is preempted.

The bounds. U is what the rows can hold: the number of rows, times the largest service of one request (its prompt and twice its max_tokens),
divided by the lowest weight.

- No counter exceeds the virtual time by more than U: a tenant is admitted only if it has the lowest counter of those in the queue, and then
  gets no more than what its rows hold.
- No tenant with requests in the queue is below the virtual time by more than the credit.
- So between two plans throughout which two tenants had requests in the queue, their service by weight differs by 2 (U + credit) at most,
  however long that was and however many requests wait.
- The engine never rests while a request waits that could be computed: there is always a head of the queue, and it lacks rows, pages or
  budget, as without fairness.

tests/schedule/test_fairness.py checks these with random requests."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import fsum
from operator import attrgetter

import msgspec

from octavo.schedule.policy import Order, WaitingQueue
from octavo.schedule.request import SCORED_COST, Request
from octavo.schedule.results import Planned

UNIT = 2**20
"""Of a counter: one token of a tenant with weight 1. Counters are integers, so that a replay adds up the same."""
CREDIT_STEPS = 4
"""The credit, in full steps of tokens."""
MAX_KNOWN = 4096
"""Tenants without open requests whose counters are kept. One that is forgotten starts like a new one."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


class Tenant:
    """`rank`: its place by the last plan's order; the lowest goes first. −1: it is not in that order."""

    __slots__ = ("counter", "num_giving", "num_open", "num_rows", "number", "price", "queue", "rank", "weight")

    def __init__(self, number: int, weight: float, counter: int = 0) -> None:
        self.number, self.counter = number, counter
        self.num_open = 0  # sequences
        self.num_rows = 0  # … that run
        self.num_giving = 0  # … that run and give way to primaries
        self.rank = -1
        self.queue: WaitingQueue | None = None  # None: none of its requests is in the queue
        self.set_weight(weight)

    def seated(self, request: Request) -> None:
        """A sequence of its got a row."""
        self.num_rows += 1
        self.num_giving += request.gives_way

    def unseated(self, request: Request) -> None:
        self.num_rows -= 1
        self.num_giving -= request.gives_way

    def set_weight(self, weight: float) -> None:
        self.weight = min(max(weight, MIN_WEIGHT), MAX_WEIGHT)
        self.price = round(UNIT / self.weight)


class TenantState(msgspec.Struct, array_like=True, gc=False):
    number: int
    weight: float
    counter: int


class FairnessState(msgspec.Struct, array_like=True, gc=False):
    virtual_time: int
    tenants: list[TenantState]


_by_counter = attrgetter("counter", "number")


class Fairness:
    """The counters of all tenants. Pure: it changes with what the scheduler plans and commits, and with nothing else.

    A plan like the last one, in which every row computes its next token, costs a few operations for each tenant, however many rows and
    requests there are; the order is looked at where a counter has passed the next one."""

    def __init__(self, max_rows: int, max_step_tokens: int) -> None:
        self._max_rows = max_rows
        self.credit = CREDIT_STEPS * max_step_tokens * UNIT
        self.virtual_time = 0
        self.known: dict[int, Tenant] = {}
        self.ordered: list[Tenant] = []  # those with open sequences, by rank
        self.waiting = FairQueue(self)
        self._charged: list[Tenant] = []  # since they were ordered, if not _is_unordered
        self._is_unordered = False  # tenants came or left, or another counter has moved
        self._total_weight: float | None = None  # of all with open sequences; None: to be added up again
        # The requests of the last plan, if each computed its next token, and what a plan with the same ones charges.
        self._steady: list[Request] = []
        self._steady_charges: list[tuple[Tenant, int]] = []

    # ── requests come and go ──

    def join(self, request: Request, number: int, weight: float) -> None:
        """A new sequence of this tenant."""
        tenant = self.known.get(number)
        if tenant is None:
            if len(self.known) - len(self.ordered) >= MAX_KNOWN:
                self._forget_some()
            tenant = self.known[number] = Tenant(number, weight)
        elif weight != tenant.weight:
            tenant.set_weight(weight)
            self._total_weight, self._steady = None, []
        request.tenant = tenant
        if not tenant.num_open:
            self._open(tenant)
        tenant.num_open += 1

    def leave(self, request: Request) -> None:
        tenant = request.tenant
        assert tenant is not None
        tenant.num_open -= 1
        if not tenant.num_open:
            self._total_weight, self._is_unordered = None, True

    def _open(self, tenant: Tenant) -> None:
        self._total_weight, self._is_unordered = None, True
        if tenant.rank < 0:  # else its last request has ended since the last plan
            tenant.rank = self.ordered[-1].rank + 1 if self.ordered else 0
            self.ordered.append(tenant)

    def _forget_some(self) -> None:
        """Forget half of the idle tenants, those with the lowest counters first: a new counter is as low, or little higher."""
        idle = sorted((each.counter, each.number) for each in self.known.values() if not each.num_open)
        for _, number in idle[: len(idle) // 2 + 1]:
            del self.known[number]
        self.ordered = [tenant for tenant in self.ordered if tenant.number in self.known]
        self._is_unordered = True

    def lift(self, tenant: Tenant) -> None:
        """Its first request enters the queue: it has no claim for the time before, except the credit."""
        lowest = self.virtual_time - self.credit
        if tenant.counter < lowest:
            tenant.counter, self._is_unordered = lowest, True

    # ── plans ──

    def rank_all(self) -> bool:
        """Order the tenants, for the next plan. True: the order may have changed, and running sequences are to be sorted again."""
        has_changed = self._is_unordered or self._has_passed()
        if has_changed:
            self._sort()
        for tenant in self.ordered:
            if tenant.queue is not None:
                if tenant.counter > self.virtual_time:
                    self.virtual_time = tenant.counter
                break
        return has_changed

    def _has_passed(self) -> bool:
        """Whether the counter of a tenant has passed that of the next one. Counters only grow, so only those that were charged can have."""
        ordered = self.ordered
        for tenant in self._charged:
            at = tenant.rank + 1
            if at < len(ordered):
                following = ordered[at]
                if tenant.counter >= following.counter and _by_counter(tenant) > _by_counter(following):
                    return True
        return False

    def _sort(self) -> None:
        for tenant in self.ordered:
            tenant.rank = -1
        self.ordered = sorted((tenant for tenant in self.ordered if tenant.num_open), key=_by_counter)
        for rank, tenant in enumerate(self.ordered):
            tenant.rank = rank
        self._is_unordered = False

    def charge(self, planned: Planned) -> None:
        """Charge what a plan computes. `num_tokens` must be known."""
        plan, requests = planned.plan, planned.requests
        if not requests:
            return
        is_steady = planned.num_tokens == len(requests) and False not in plan.samples
        if is_steady and requests == self._steady:
            for each, charge in self._steady_charges:
                each.counter += charge
            return
        charges: dict[Tenant, int] = {}
        for request, start, count, samples in zip(requests, plan.starts, plan.counts, plan.samples, strict=True):
            tenant = request.tenant
            assert tenant is not None
            if count == 1 and samples and start >= request.num_charged:  # as most are
                request.num_charged = start + 1
                charges[tenant] = charges.get(tenant, 0) + 2 * tenant.price
                is_steady = is_steady and request.special is None
                continue
            is_steady = False
            end = start + count - request.drafted  # drafts count when they turn out right
            num_new = end - max(start, request.num_charged)
            if num_new > 0:
                request.num_charged = end
                cost = num_new * (SCORED_COST if num_new > 1 and request.lacks_scores else 1)
                charges[tenant] = charges.get(tenant, 0) + (cost + samples) * tenant.price
        for each, charge in charges.items():
            each.counter += charge
        self._charged = [*charges]
        self._steady, self._steady_charges = (requests, [*charges.items()]) if is_steady else ([], [])

    def charged_until(self, request: Request, end: int) -> int:
        """Its num_charged, which steady plans leave as it was. `end`: how far it was planned, without a draft."""
        return max(request.num_charged, end) if request.num_charged and request.special is None else request.num_charged

    def lose(self, request: Request, end: int) -> None:
        """It is to lose some of the tokens that were planned, up to `end`: these were charged once, and will not be again."""
        request.num_charged, self._steady = self.charged_until(request, end), []

    def charge_drafts(self, request: Request, num_accepted: int) -> None:
        """Drafted tokens were right: each was computed and sampled."""
        if num_accepted > 0:
            assert request.tenant is not None
            request.num_charged += num_accepted
            request.tenant.counter += 2 * num_accepted * request.tenant.price
            self._is_unordered = True

    # ── rows ──

    def may_displace(self, head: Request) -> bool:
        """Whether victims() might find any, for all that the numbers of rows say."""
        tenant = head.tenant
        assert tenant is not None
        if tenant.num_giving:
            return True
        return self._is_entitled(tenant) and any(
            self._is_above(other, other.num_rows, tenant) for other in self.ordered if other.num_rows > 1
        )

    def victims(self, head: Request, running: Iterable[Request]) -> list[Request]:
        """Sequences that may be preempted so that `head` gets a row, oldest first: those of its tenant that give way to primaries, and
        those of tenants that hold more than their share, if its own holds less than half of its share. `running`: in order."""
        tenant = head.tenant
        assert tenant is not None
        is_entitled = self._is_entitled(tenant)
        num_rows: dict[Tenant, int] = {}
        found = []
        for request in reversed([*running]):
            other = request.tenant
            assert other is not None
            if request.order < head.order:
                break
            if other is tenant:
                if request.gives_way:
                    found.append(request)
            elif is_entitled and self._is_above(other, num_rows.setdefault(other, other.num_rows), tenant):
                num_rows[other] -= 1
                found.append(request)
        return found[::-1]

    def _is_entitled(self, tenant: Tenant) -> bool:
        """Whether it holds less than half of its share of the rows, also with one more."""
        if not tenant.num_rows:
            return True
        if self._total_weight is None:
            # The same in whatever order they are added: a replay from the middle may have another one.
            self._total_weight = fsum(each.weight for each in self.ordered if each.num_open)
        return 2 * (tenant.num_rows + 1) * self._total_weight <= self._max_rows * tenant.weight

    @staticmethod
    def _is_above(other: Tenant, num_rows: int, tenant: Tenant) -> bool:
        """Whether another one with so many rows has more by its weight, also with one less, than this one with one more."""
        return (num_rows - 1) * tenant.weight >= (tenant.num_rows + 1) * other.weight

    # ── snapshots ──

    def state(self) -> FairnessState:
        tenants = [TenantState(each.number, each.weight, each.counter) for each in self.known.values()]
        return FairnessState(self.virtual_time, tenants)

    def restore(self, state: FairnessState) -> None:
        """To be called before the sequences join again."""
        self.virtual_time = state.virtual_time
        self.known = {each.number: Tenant(each.number, each.weight, each.counter) for each in state.tenants}
        self.ordered = []
        self._charged, self._steady, self._total_weight, self._is_unordered = [], [], None, True


class FairQueue(WaitingQueue):
    """A queue for each tenant, in the policy's order; the first is the tenant with the lowest rank."""

    def __init__(self, fairness: Fairness) -> None:
        super().__init__()
        self._fairness = fairness

    def add(self, request: Request) -> None:
        self._note(request)
        tenant = request.tenant
        assert tenant is not None
        if tenant.queue is None:
            tenant.queue = _TenantQueue(_order_within)
            self._fairness.lift(tenant)
        tenant.queue.add(request)

    def remove(self, request: Request) -> None:
        self._unnote(request)
        tenant = request.tenant
        assert tenant is not None and tenant.queue is not None
        tenant.queue.remove(request)
        if not len(tenant.queue):
            tenant.queue = None

    def head(self) -> Request | None:
        for tenant in self._fairness.ordered:
            if tenant.queue is not None:
                return tenant.queue.head()
        return None

    def first(self, count: int) -> list[Request]:
        return list(islice(chain.from_iterable(queue.first(count) for queue in self._in_order()), count))

    def place(self, request: Request) -> int:
        num_before = 0
        for queue in self._in_order():
            if request in queue:
                return num_before + queue.place(request)
            num_before += len(queue)
        return num_before + 1

    def _in_order(self) -> Iterator[WaitingQueue]:
        return (tenant.queue for tenant in self._fairness.ordered if tenant.queue is not None)


class _TenantQueue(WaitingQueue):
    """The requests of one tenant. The queue of all counts the backlog."""

    def _note(self, request: Request) -> None:
        self._waiting[request.sequence] = request

    def _unnote(self, request: Request) -> None:
        del self._waiting[request.sequence]


def _order_within(request: Request) -> Order:
    """Its order among the sequences of its tenant."""
    return (0, request.num_siblings_ahead, request.place, request.sequence)
