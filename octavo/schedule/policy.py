"""Policies: which request is next. A policy ranks a request; the lowest rank goes first, and among equals the one that came first:
no request overtakes another of its rank. When pages run out, the request that would go last is preempted first."""

import heapq
from collections.abc import Callable, Iterator

from octavo.messages import GenerateRequest
from octavo.schedule.request import Request

Policy = Callable[[GenerateRequest, int], int]
"""(request, its place in the order of arrival) → its rank."""


def arrival(source: GenerateRequest, sequence: int) -> int:
    """Strict first come, first served. A preempted request keeps its place: before everything newer.

    So no request is overtaken, and the wait for a row is bounded, in steps of the loop, whatever comes later. A step computes at
    most `budget` tokens, `depth` plans are in flight while the next is made. For each choice that came before: `longest` is its
    prompt and max_tokens, `open` what it may still sample, `uncomputed` what of `longest` has no keys and values yet.

    - With pages for no more than one request at a time: Σ (2 ⌈longest / budget⌉ + open + depth + 2) + 1. The oldest is never
      preempted for another, so it computes in every step; once more from its beginning if it was preempted before.
    - The queue's head, without a preemption meanwhile: ⌊Σ uncomputed / budget⌋ + max open + depth + 3, over the running requests.
      A step either spends its budget or advances all of them.

    A prompt that must be computed whole, in one step, has the same bounds: at worst all running requests end before it.

    A request whose grammar is still being compiled is not in the queue yet. How many grammars are compiled before its own is
    bounded (grammar_cache.py), whatever comes later. Then it enters the queue at its old place, and the bounds above count the
    requests that came before it and those that passed it by and run.

    tests/schedule/test_scheduler_fairness.py checks these bounds with random requests, test_scheduler_grammar_cache.py those of
    grammars. Beam searches are left out: one sits out a step while its scores are on their way, so a token takes several steps."""
    return sequence


def priority(source: GenerateRequest, sequence: int) -> int:
    """By the request's `priority` field, lower first. It orders the queue, and chooses which request is preempted when pages
    run out; a running request is never preempted to admit another."""
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
        """In no particular order."""
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
        """About the first `count`, to be shown: only the head is exact. Costs the same however many wait."""
        entries = heapq.nsmallest(count, self._heap[: 8 * count])
        return [self._waiting[sequence] for _, sequence in entries if sequence in self._waiting]

    def remove(self, request: Request) -> None:
        del self._waiting[request.sequence]
        self.num_prompt_tokens -= request.prompt_len
        if self._heap[0][1] == request.sequence:
            heapq.heappop(self._heap)

    def place(self, request: Request) -> int:
        """1: it is the head. Walks the queue: not for every step."""
        key = (request.rank, request.sequence)
        return 1 + sum((other.rank, other.sequence) < key for other in self._waiting.values())
