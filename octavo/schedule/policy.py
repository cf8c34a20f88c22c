"""Policies: which request is next. A policy ranks a request; the lowest rank goes first. Within a rank, the primary
sequences of all responses go first, in the order in which they became primary; then the second sequences of all responses, the
third ones, and so on (Siblings).
When pages run out, the sequence that would go last is preempted first."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter

from octavo.messages import GenerateRequest
from octavo.schedule.request import Request

Policy = Callable[[GenerateRequest], int]
"""The request's rank."""

Order = tuple[int, int, int, int]
"""Of a sequence: the lowest goes first. The last number is the sequence."""


def arrival(source: GenerateRequest) -> int:
    """Strict first come, first served over responses: each has one primary at a time. A preempted request keeps its place: before
    everything newer.

    So no primary is overtaken, and the wait for a row is bounded, in steps of the loop, whatever comes later. A primary waits for
    older primaries only: at most one sequence of each response that is open when it comes, however many these have and however long they
    are. All others give way to it: it is planned before them, and if it lacks rows or pages, those that run are preempted,
    youngest first. None is preempted in vain: only if all of them together may hold what it lacks.

    A step computes at most `budget` tokens, `depth` plans are in flight while the next is made. For each older primary: `longest` is
    its prompt and max_tokens, `open` what it may still sample, `uncomputed` what of `longest` has no keys and values yet.

    - With pages for no more than one request at a time: Σ (2 ⌈longest / budget⌉ + open + depth + 2) + 1. The oldest is never
      preempted for another, so it computes in every step; once more from its beginning if it was preempted before.
    - The queue's head, without a preemption of an older primary meanwhile: ⌊Σ uncomputed / budget⌋ + max open + depth + 3, over the
      older primaries that run. A step either spends its budget or advances all of them.

    A prompt that must be computed whole, in one step, has the same bounds: at worst all older primaries end before it.

    Where a step beside running streams has a limit (stall_limit.py), it computes at least MIN_PROMPT_TOKENS of the oldest prompt: the
    bounds hold with that in place of `budget`, if it is less.

    A sequence that is not primary runs in what primaries leave free. It becomes primary after all older sequences of its response
    have ended, so a response of k sequences waits k times at most as one sequence does.

    A request whose grammar is still being compiled is not in the queue yet. How many grammars are compiled before its own is
    bounded (grammar_cache.py), whatever comes later. Then it enters the queue at its old place, and the bounds above count the
    requests that came before it and those that passed it by and run.

    tests/schedule/test_scheduler_fairness.py checks these bounds with random requests, test_scheduler_grammar_cache.py those of
    grammars. Beam searches are left out: one sits out a step while its scores are on their way, so a token takes several steps."""
    return 0


def priority(source: GenerateRequest) -> int:
    """By the request's `priority` field, lower first. It orders the queue, and chooses which request is preempted when pages
    run out. Primaries go before other sequences among requests of one priority. A running request is never preempted to admit
    another, unless it is not the first sequence of its response, and the other is the primary of one with the same or a lower
    `priority`."""
    return source.priority


POLICIES: dict[str, Policy] = {"fcfs": arrival, "priority": priority}


class Siblings:
    """The open sequences of every response, and which of them is its primary.

    A response's sequences are all choices of all its prompts; a beam search counts as one. The oldest that is open is the primary.
    Primaries are served first come, first served, before all other sequences, so a response takes one place in the queue, however
    many sequences it has. When a primary ends, the next sibling becomes primary and takes a new place, behind all primaries there
    are."""

    def __init__(self) -> None:
        self._open: dict[str, OrderedDict[int, Request]] = {}  # response → its open sequences, oldest first

    def join(self, request: Request) -> None:
        """Add a new sequence, behind all that its response has."""
        sequences = self._open.setdefault(request.response_id, OrderedDict())
        request.num_siblings_ahead = len(sequences)
        request.gives_way = bool(sequences)
        sequences[request.sequence] = request

    def restore(self, request: Request) -> None:
        """Add a sequence of a snapshot, which has its place already. To be called in the order of their sequences."""
        self._open.setdefault(request.response_id, OrderedDict())[request.sequence] = request

    def leave(self, request: Request) -> Request | None:
        """A sequence has ended. Returns the one that becomes primary, if this one was."""
        sequences = self._open.get(request.response_id)
        if sequences is None or sequences.pop(request.sequence, None) is None:
            return None  # a beam: only the leader of its search is counted
        if not sequences:
            del self._open[request.response_id]
            return None
        return next(iter(sequences.values())) if request.is_primary else None


class Backlog:
    """How many requests wait, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += request.prompt_len

    def remove(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= request.prompt_len


class WaitingQueue:
    """Requests in the policy's order. Adding and removing cost O(log n), looking at the head O(1)."""

    def __init__(self, order: Callable[[Request], Order] = attrgetter("order")) -> None:
        self._order = order
        self._heap: list[Order] = []  # entries that no longer hold are skipped later
        self._waiting: dict[int, Request] = {}
        self.primaries = Backlog()
        self.prompts = Backlog()  # of all that wait; several choices of a prompt count once

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return request.sequence in self._waiting

    def add(self, request: Request) -> None:
        self._note(request)
        if len(self._heap) > 2 * len(self._waiting) + 64:  # a queue that never empties would keep all old entries
            self._heap = sorted(map(self._order, self._waiting.values()))
        else:
            heapq.heappush(self._heap, self._order(request))

    def _note(self, request: Request) -> None:
        self._waiting[request.sequence] = request
        for backlog in self._backlogs(request):
            backlog.add(request)

    def head(self) -> Request | None:
        while self._heap:
            request = self._of(self._heap[0])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def first(self, count: int) -> list[Request]:
        """About the first `count`, to be shown: only the head is exact. Costs the same however many wait."""
        orders = dict.fromkeys(heapq.nsmallest(count, self._heap[: 8 * count]))
        return [request for order in orders if (request := self._of(order)) is not None]

    def remove(self, request: Request) -> None:
        self._unnote(request)
        if self._heap[0] == self._order(request):
            heapq.heappop(self._heap)

    def _unnote(self, request: Request) -> None:
        del self._waiting[request.sequence]
        for backlog in self._backlogs(request):
            backlog.remove(request)

    def place(self, request: Request) -> int:
        """1: it is the head. Walks the queue: not for every step."""
        order = self._order(request)
        return 1 + sum(self._order(other) < order for other in self._waiting.values())

    def _of(self, order: Order) -> Request | None:
        """The request that waits with this order. None: it has left, or has another order by now."""
        request = self._waiting.get(order[-1])
        return request if request is not None and self._order(request) == order else None

    def _backlogs(self, request: Request) -> Iterator[Backlog]:
        if request.is_primary:
            yield self.primaries
        if request.index == 0:
            yield self.prompts
