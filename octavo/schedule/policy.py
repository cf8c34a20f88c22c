"""Who is next: the only policy seam of the scheduler. A policy ranks a request; the lowest rank goes first, and of equals the
one that came first: nobody overtakes within a rank. When pages run out, who would go last leaves first.
Knows nothing of rows, pages or budgets, and never allocates."""

import heapq
from collections.abc import Callable, Iterator

from octavo.messages import GenerateRequest
from octavo.schedule.request import Request

Policy = Callable[[GenerateRequest, int], int]
"""Of what a client asks, and its place in the order of arrival."""


def arrival(source: GenerateRequest, sequence: int) -> int:
    """Strict first come, first served. A preempted request keeps its place: before everything newer.

    So nobody is overtaken, and who waits knows its bound, in turns of the loop, whatever comes after it. A step computes at most
    `budget` tokens, `depth` plans are in flight while the next is made. Of each choice that came before it: `longest` is prompt
    and max_tokens, `open` what it may still sample, `uncomputed` what of `longest` has no keys and values yet.

    - With pages for no more than one request at a time: Σ (2 ⌈longest / budget⌉ + open + depth + 2) + 1. The oldest is never
      driven out by another, so it computes in every turn; once more from its beginning if it was driven out before.
    - The queue's head, if nobody is driven out meanwhile: ⌊Σ uncomputed / budget⌋ + max open + depth + 3, over those who run.
      A step either spends its budget or takes everybody further.

    A prompt that must be computed whole, in one step, has the same bounds: at worst all who run end before it.

    A request whose grammar is still being compiled is not in the queue yet. How many grammars are compiled before it is, is
    bounded in shelf.py, whatever comes after it. Then it enters the queue at its old place, and of the bounds above those count
    who came before it, and those who passed it by and run.

    tests/schedule/test_scheduler_fairness.py holds the bounds against random requests, test_scheduler_shelf.py those of the shelf.
    Beam searches are left out: while one's scores are on their way it sits out a step, so it takes several turns for a token."""
    return sequence


def priority(source: GenerateRequest, sequence: int) -> int:
    """By the caller's wish, lower first. Whoever runs stays as long as there are pages: a wish moves the queue, and chooses who
    leaves when pages run out."""
    return source.priority


POLICIES: dict[str, Policy] = {"fcfs": arrival, "priority": priority}


class WaitingQueue:
    """Requests in the policy's order. Adding and removing cost O(log n), looking at the head O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (rank, sequence); entries of removed requests are skipped later
        self._waiting: dict[int, Request] = {}
        self.num_prompt_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In no order: for those who count."""
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return request.sequence in self._waiting

    def add(self, request: Request) -> None:
        self._waiting[request.sequence] = request
        self.num_prompt_tokens += request.prompt_len
        heapq.heappush(self._heap, (request.rank, request.sequence))

    def head(self) -> Request | None:
        while self._heap:
            request = self._waiting.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def first(self, count: int) -> list[Request]:
        """About the first so many, for those who watch: exact is the head alone. Costs the same however many wait."""
        entries = heapq.nsmallest(count, self._heap[: 8 * count])
        return [self._waiting[sequence] for _, sequence in entries if sequence in self._waiting]

    def remove(self, request: Request) -> None:
        del self._waiting[request.sequence]
        self.num_prompt_tokens -= request.prompt_len
        if self._heap[0][1] == request.sequence:
            heapq.heappop(self._heap)

    def place(self, request: Request) -> int:
        """1: it is the head. Walks the queue: for those who ask."""
        key = (request.rank, request.sequence)
        return 1 + sum((other.rank, other.sequence) < key for other in self._waiting.values())
