"""Seats: who holds a row, who waits for one, and what each gives back when it leaves, of its own will or not.
Knows nothing of steps, budgets or results."""

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from octavo.cache import Growth, KVCache
from octavo.messages import Finish, PageMove, StepPlan, StepResult, TokenDelta
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.grammar_cache import MAX_UNUSED, GrammarCache
from octavo.schedule.outcome import sampling_of
from octavo.schedule.policy import WaitingQueue
from octavo.schedule.request import Request


class Returned(NamedTuple):
    """A request that left its row and is in the queue again."""

    request: Request
    num_computed: int  # tokens that it had computed
    is_swapped: bool  # they are on host pages; else they will be computed again


class Seats:
    def __init__(self, cache: KVCache, max_rows: int, swap_min_tokens: int) -> None:
        """`swap_min_tokens`: a preempted request with fewer computed tokens is computed again rather than swapped."""
        self.cache, self.max_rows, self.swap_min_tokens = cache, max_rows, swap_min_tokens
        self.waiting = WaitingQueue()
        # Who could not run yet, whatever is free: its grammar is being made ready. It stands in nobody's way, and nobody in its
        # own: ready, it enters the queue at the place that it has by its arrival. By sequence.
        self.awaiting_grammar: dict[int, Request] = {}
        self.grammar_cache = GrammarCache(max_rows + MAX_UNUSED)
        self.running: list[Request] = []  # in the policy's order: oldest first
        self.num_preemptions = 0
        # What happened since the last plan was begun, for those who keep the times.
        self.returned: list[Returned] = []
        self.ended: list[Request] = []
        self.readied: list[Request] = []  # from aside to the queue
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._groups: dict[str, list[Request]] = {}  # request id → its choices that are not finished
        self._leaves: list[int] = []
        self._watched: set[int] = set()  # sequences of requests that want to hear how far their prompt is

    @property
    def is_idle(self) -> bool:
        return not self._groups

    @property
    def has_work(self) -> bool:
        """Whether there is somebody to plan for: who is aside must be made ready first."""
        return bool(self.running) or len(self.waiting) > 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.awaiting_grammar)

    @property
    def num_waiting_tokens(self) -> int:
        """Of their prompts."""
        return self.waiting.num_prompt_tokens + sum(request.prompt_len for request in self.awaiting_grammar.values())

    def waits(self, request: Request) -> bool:
        return request in self.waiting or request.sequence in self.awaiting_grammar

    def has(self, request_id: str) -> bool:
        return request_id in self._groups

    def request_ids(self) -> list[str]:
        return list(self._groups)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def choices(self, request_id: str) -> list[Request]:
        """Those of a request that are not finished."""
        return list(self._groups.get(request_id, ()))

    def requests(self) -> Iterator[Request]:
        """Every choice that is not finished: for those who look, between two steps."""
        return (choice for choices in self._groups.values() for choice in choices)

    def slot_use(self) -> tuple[int, int]:
        """(slots that hold a token, slots allocated), over the pages owned now. Walks every page: not for every step."""
        page_size = self.cache.page_size
        filled: dict[int, int] = {}
        for request in self.running:
            for table in self.cache.tables.get(request.sequence, ()):
                for i, page in enumerate(table.pages, table.first):
                    held = min(max(request.computed - i * page_size, 0), page_size)
                    filled[page] = max(filled.get(page, 0), held)
        return sum(filled.values()), len(filled) * page_size

    def prepared(self, grammar: str) -> None:
        """It is ready now, and so is whoever needs no more than that."""
        self.grammar_cache.prepared(grammar)
        same = (request for request in self.awaiting_grammar.values() if request.params.grammar == grammar)
        self._ready(request for request in same if self.grammar_cache.is_ready(request.id))

    def _ready(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            del self.awaiting_grammar[request.sequence]
            self.waiting.add(request)
            self.readied.append(request)

    def _queue(self, request: Request) -> None:
        if request.params.grammar and not self.grammar_cache.is_ready(request.id):
            self.awaiting_grammar[request.sequence] = request
        else:
            self.waiting.add(request)

    def _seat(self, request: Request) -> None:
        request.row = self._free_rows.pop()
        insort(self.running, request, key=lambda running: (running.rank, running.sequence))

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._leaves.append(request.row)
        self._free_rows.append(request.row)
        request.row = -1
        request.epoch += 1

    def _preempt(self, request: Request, draft: StepPlan) -> None:
        """Back to the queue, where it is older than all that wait; its tokens go to host pages or are computed again."""
        self.num_preemptions += 1
        if isinstance(request.special, BeamGroup):
            self._preempt_beams(request.special)
            return
        request.num_preemptions += 1
        num_computed = request.computed if request.sequence in self.cache.tables else 0
        self._leave(request)
        if request.sequence in self.cache.tables:
            transfer = None
            if request.computed >= max(1, self.swap_min_tokens):
                transfer = self.cache.swap_out(request.sequence, request.computed)
            if transfer is None:
                self.cache.release(request.sequence)
                request.computed = 0
            else:
                request.is_swapped = True
                for device, host in zip(transfer.device, transfer.host, strict=True):
                    draft.moves.append(PageMove("out", device, host))
        else:  # it had not forked yet: from now on it is a request of its own
            request.computed = 0
            self._leader_of(request).followers.remove(request)
        request.num_published = 0
        self.returned.append(Returned(request, num_computed, request.is_swapped))
        self.waiting.add(request)

    def _leader_of(self, follower: Request) -> Request:
        return next(request for request in self._groups[follower.id] if follower in request.followers)

    def _preempt_beams(self, group: BeamGroup) -> None:
        """Computed again: copies on the host would not share what the beams share. The leader stands for all of them."""
        self.returned.append(Returned(group.leader, group.leader.computed, False))
        for request in group.requests:
            self._leave(request)
            if request.sequence in self.cache.tables:
                self.cache.release(request.sequence)
            request.computed = request.num_published = 0
        group.gather()
        group.leader.num_preemptions += 1
        self.waiting.add(group.leader)

    def _extend(self, request: Request, count: int, draft: StepPlan) -> list[Growth] | None:
        """Pages for `count` more tokens, preempting the youngest as needed. None: the request itself had to leave."""
        start, end = request.computed, request.computed + count
        while (growths := self.cache.extend(request.sequence, start, end)) is None:
            victim = self.running[-1]
            self._preempt(victim, draft)
            if request.row < 0:  # it was itself the youngest, or a beam among the youngest's
                break
        return growths

    def _hand_over(self, leader: Request) -> None:
        """A leader is aborted alone, before its prompt is computed: each of its followers goes on as a request of its own."""
        for follower in leader.followers:
            if follower.row >= 0:
                self._leave(follower)
                self.returned.append(Returned(follower, 0, False))
            follower.computed = 0
            self._queue(follower)
        leader.followers = []

    def _failed(self, plan: StepPlan, requests: list[Request], result: StepResult) -> list[TokenDelta]:
        """End the requests whose token of this step does not count: they alone cannot go on."""
        sampling = sampling_of(plan, requests)
        deltas = []
        for at, message in result.failures.items():
            if not (request := sampling[at]).is_finished:
                self._finish(request)
                finish = Finish("error", None, request.num_cached, request.num_preemptions, message)
                deltas.append(TokenDelta(request.id, request.index, [], finish))
        return deltas

    def _limited(self, plan: StepPlan, requests: list[Request], result: StepResult) -> list[TokenDelta]:
        """Requests that their grammar brought to an end because of their limit. They end by their length, as if what they have
        now were all that was asked for."""
        sampling = sampling_of(plan, requests)
        deltas = []
        for at in result.last:
            if (request := sampling[at]).is_finished:
                continue
            request.max_len = min(request.max_len, len(request.tokens) + 1)
            if result.tokens[at] in request.stop_ids:  # which nobody chose
                self._finish(request)
                finish = Finish("length", None, request.num_cached, request.num_preemptions)
                deltas.append(TokenDelta(request.id, request.index, [], finish))
        return deltas

    def _finish(self, request: Request) -> None:
        """Free row and pages at once: a step in flight that still writes to them runs before any that reuses them."""
        request.is_finished = True
        self._watched.discard(request.sequence)
        self.ended.append(request)
        for other in self._groups[request.id]:
            if request in other.followers:
                other.followers.remove(request)
        if request.row >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.awaiting_grammar.pop(request.sequence, None)
        if request.is_swapped or request.sequence in self.cache.tables:
            self.cache.release(request.sequence)
        choices = self._groups[request.id]
        choices.remove(request)
        if not choices:
            del self._groups[request.id]
            if request.params.grammar:
                for readied in self.grammar_cache.drop(request.id):
                    self._ready(choice for choice in self._groups[readied] if choice.sequence in self.awaiting_grammar)
