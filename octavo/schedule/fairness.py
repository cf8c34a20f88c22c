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

import msgspec

from octavo.schedule.policy import Order, WaitingQueue
from octavo.schedule.request import SCORED_COST, Request

UNIT = 2**20
"""Of a counter: one token of a tenant with weight 1. Counters are integers, so that a replay adds up the same."""
CREDIT_STEPS = 4
"""The credit, in full steps of tokens."""
MAX_KNOWN = 4096
"""Tenants without open requests whose counters are kept. One that is forgotten starts like a new one."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


class Tenant:
    """`rank`: its place by the last plan's order; the lowest goes first."""

    __slots__ = ("counter", "num_open", "number", "price", "rank", "weight")

    def __init__(self, number: int, weight: float, counter: int = 0) -> None:
        self.number, self.counter = number, counter
        self.num_open = 0  # sequences
        self.rank = 0
        self.set_weight(weight)

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


class Fairness:
    """The counters of all tenants. Pure: it changes with what the scheduler plans and commits, and with nothing else."""

    def __init__(self, max_rows: int, max_step_tokens: int) -> None:
        self._max_rows = max_rows
        self.credit = CREDIT_STEPS * max_step_tokens * UNIT
        self.virtual_time = 0
        self.known: dict[int, Tenant] = {}
        self.ordered: list[Tenant] = []  # those with open sequences, by rank
        self.waiting = FairQueue(self)

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
        request.tenant = tenant
        if not tenant.num_open:
            self._open(tenant)
        tenant.num_open += 1

    def leave(self, request: Request) -> None:
        assert request.tenant is not None
        request.tenant.num_open -= 1

    def _open(self, tenant: Tenant) -> None:
        if tenant not in self.ordered:  # else its last request has ended since the last plan
            tenant.rank = self.ordered[-1].rank + 1 if self.ordered else 0
            self.ordered.append(tenant)

    def _forget_some(self) -> None:
        """Forget half of the idle tenants, those with the lowest counters first: a new counter is as low, or little higher."""
        idle = sorted((each.counter, each.number) for each in self.known.values() if not each.num_open)
        for _, number in idle[: len(idle) // 2 + 1]:
            del self.known[number]
        self.ordered = [tenant for tenant in self.ordered if tenant.number in self.known]

    def lift(self, tenant: Tenant) -> None:
        """Its first request enters the queue: it has no claim for the time before, except the credit."""
        tenant.counter = max(tenant.counter, self.virtual_time - self.credit)

    # ── plans ──

    def rank_all(self) -> bool:
        """Order the tenants, for the next plan. True: the order has changed, and running sequences are to be sorted again."""
        ordered = sorted(
            (tenant for tenant in self.ordered if tenant.num_open), key=lambda each: (each.counter, each.number)
        )
        for tenant in ordered:
            if self.waiting.has(tenant):
                self.virtual_time = max(self.virtual_time, tenant.counter)
                break
        if ordered == self.ordered:
            return False
        self.ordered = ordered
        for rank, tenant in enumerate(ordered):
            tenant.rank = rank
        return True

    def charge(self, request: Request, start: int, count: int, samples: bool) -> None:
        """A plan computes `count` tokens of a sequence, from `start` on."""
        tenant = request.tenant
        assert tenant is not None
        end = start + count - request.drafted  # drafts count when they turn out right
        num_new = end - max(start, request.num_charged)
        if num_new > 0:
            request.num_charged = end
            cost = num_new * (SCORED_COST if num_new > 1 and request.lacks_scores else 1)
            tenant.counter += (cost + samples) * tenant.price

    def charge_drafts(self, request: Request, num_accepted: int) -> None:
        """Drafted tokens were right: each was computed and sampled."""
        assert request.tenant is not None
        request.num_charged += num_accepted
        request.tenant.counter += 2 * num_accepted * request.tenant.price

    # ── rows ──

    def victims(self, head: Request, running: Iterable[Request]) -> list[Request]:
        """Sequences that may be preempted so that `head` gets a row, oldest first: those of its tenant that give way to primaries, and
        those of tenants that hold more than their share, if its own holds less than half of its share. `running`: in order."""
        tenant, running = head.tenant, list(running)
        assert tenant is not None
        num_rows: dict[int, int] = {}
        for request in running:
            assert request.tenant is not None
            num_rows[request.tenant.number] = num_rows.get(request.tenant.number, 0) + 1
        num_own = num_rows.get(tenant.number, 0) + 1  # with the head
        total = sum(each.weight for each in self.ordered if each.num_open)
        is_entitled = num_own == 1 or 2 * num_own * total <= self._max_rows * tenant.weight
        found = []
        for request in reversed(running):
            other = request.tenant
            assert other is not None
            if request.order < head.order:
                break
            if other is tenant:
                if request.gives_way:
                    found.append(request)
            elif is_entitled and (num_rows[other.number] - 1) * tenant.weight >= num_own * other.weight:
                num_rows[other.number] -= 1
                found.append(request)
        return found[::-1]

    # ── snapshots ──

    def state(self) -> FairnessState:
        tenants = [TenantState(each.number, each.weight, each.counter) for each in self.known.values()]
        return FairnessState(self.virtual_time, tenants)

    def restore(self, state: FairnessState) -> None:
        """To be called before the sequences join again."""
        self.virtual_time = state.virtual_time
        self.known = {each.number: Tenant(each.number, each.weight, each.counter) for each in state.tenants}
        self.ordered = []


class FairQueue(WaitingQueue):
    """A queue for each tenant, in the policy's order; the first is the tenant with the lowest rank."""

    def __init__(self, fairness: Fairness) -> None:
        super().__init__()
        self._fairness = fairness
        self._queues: dict[int, WaitingQueue] = {}  # of tenants that have requests in it

    def has(self, tenant: Tenant) -> bool:
        return tenant.number in self._queues

    def add(self, request: Request) -> None:
        self._note(request)
        tenant = request.tenant
        assert tenant is not None
        queue = self._queues.get(tenant.number)
        if queue is None:
            queue = self._queues[tenant.number] = WaitingQueue(_order_within)
            self._fairness.lift(tenant)
        queue.add(request)

    def remove(self, request: Request) -> None:
        self._unnote(request)
        assert request.tenant is not None
        number = request.tenant.number
        self._queues[number].remove(request)
        if not len(self._queues[number]):
            del self._queues[number]

    def head(self) -> Request | None:
        for queue in self._in_order():
            return queue.head()
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
        queues = self._queues
        return (queue for each in self._fairness.ordered if (queue := queues.get(each.number)) is not None)


def _order_within(request: Request) -> Order:
    """Its order among the sequences of its tenant."""
    return (0, request.num_siblings_ahead, request.place, request.sequence)
