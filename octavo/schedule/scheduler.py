"""Continuous batching, first come first served: plan() decides a step, commit() learns what it sampled.
Knows nothing of tensors, text, clocks or processes; one plan may be in flight while the next is made.

The one rule: a request has `length` tokens, `computed` of them done; a step gives it min(length − computed, budget).
Running requests come first, oldest first; then the queue's head is admitted while rows, pages and budget last.
When pages run out the youngest running request leaves first. So the oldest always advances, and nothing overtakes.
A request for a vector is one that ends when its prompt is computed; some must be computed whole, in one step."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from octavo.cache import KVCache
from octavo.messages import Entering, Finish, FinishReason, GenerateRequest, PageMove, StepPlan, StepResult, TokenDelta
from octavo.schedule.extras import progress_of, scored, take_scores
from octavo.schedule.order import Policy, WaitingQueue, arrival
from octavo.schedule.request import Request

WaitReason = Literal["rows", "pages", "budget"]


class _Issued(NamedTuple):
    """What commit() must remember of a plan: its rows' requests, as they were."""

    requests: list[Request]
    epochs: list[int]
    forking: list[Request]  # leaders whose prompt this plan completes


class Returned(NamedTuple):
    """A request that left its row and is in the queue again."""

    request: Request
    num_computed: int  # tokens that it had computed
    is_swapped: bool  # they are on host pages; else they will be computed again


class Scheduler:
    def __init__(
        self, cache: KVCache, max_rows: int, max_step_tokens: int, swap_min_tokens: int = 0, policy: Policy = arrival
    ) -> None:
        """`swap_min_tokens`: a preempted request with fewer computed tokens is computed again rather than swapped."""
        assert not any(cache.windows) or max_step_tokens <= cache.max_step_tokens, "windows have room for smaller steps"
        self.cache = cache
        self.max_rows, self.max_step_tokens, self.swap_min_tokens = max_rows, max_step_tokens, swap_min_tokens
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []  # oldest first
        self.head_waits_for: WaitReason | None = (
            None  # why the queue's head was not admitted; all behind it wait for order
        )
        self.num_preemptions = 0
        # What happened since the last plan was begun, for those who keep the times.
        self.admitted: list[Request] = []  # in the order of the plan's last rows
        self.forked: list[Request] = []
        self.returned: list[Returned] = []
        self.ended: list[Request] = []
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._groups: dict[str, list[Request]] = {}  # request id → its choices that are not finished
        self._in_flight: deque[_Issued] = deque()
        self._leaves: list[int] = []
        self._watched: set[int] = set()  # sequences of requests that want to hear how far their prompt is
        self._next_sequence = 0
        self._step = 0

    # ── what the loop calls ──

    def add(self, source: GenerateRequest) -> None:
        assert source.params.n <= self.max_rows, "refused at the door"
        assert not source.is_whole or len(source.prompt_ids) <= self.max_step_tokens, "refused at the door"
        choices = [Request(self._next_sequence + i, source, i) for i in range(source.params.n)]
        self._next_sequence += len(choices)
        if source.begun:
            choices = [choice for choice in choices if source.begun[choice.index] is not None]
        self._groups[source.id] = choices[:]
        if any(choice.has_output for choice in choices):  # it outlived an engine: each goes on as if it was preempted
            for choice in choices:
                self.waiting.add(choice)
            return
        leader, *leader.followers = choices
        if source.wants_progress:
            self._watched.add(leader.sequence)
        self.waiting.add(leader)

    def abort(self, request_id: str, index: int = -1) -> bool:
        """Free everything that one choice (−1: every choice) of the request holds, now. False: there is none (any more)."""
        choices = [request for request in self._groups.get(request_id, ()) if index in (-1, request.index)]
        for request in choices:
            if index >= 0 and request.followers:
                self._hand_over(request)
            self._finish(request)
        return bool(choices)

    def plan(self) -> StepPlan:
        draft = StepPlan(self._step, self._leaves, [], [], [], [], [], [], [], [], [], [])
        issued = _Issued([], [], [])
        self.admitted, self.forked, self.returned, self.ended = [], [], [], []
        budget = self._plan_running(draft, issued)
        if budget >= 0:
            self._plan_admissions(draft, issued, budget)
        elif len(self.waiting):
            self.head_waits_for = "pages"
        for leader in issued.forking:  # last: a choice reads what its leader writes, so it may start in the next step
            self._fork(leader, draft)
        if not draft.is_empty:
            self._in_flight.append(issued)
            self._leaves = []
            self._step += 1
        return draft

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Apply the oldest uncommitted plan's tokens. Rows whose request has since finished are ignored."""
        issued = self._in_flight.popleft()
        tokens, vectors = iter(result.tokens), iter(result.vectors)
        deltas = self._failed(plan, issued, result) if result.failures else []
        if result.last:
            for at in result.last:  # as if that were all that was asked for: it ends by its length
                ending = _sampling(plan, issued)[at]
                ending.max_len = min(ending.max_len, len(ending.tokens) + 1)
        if self._watched:
            deltas += progress_of(plan, issued.requests, issued.epochs, self._watched)
        page_size = self.cache.page_size
        scores = take_scores(plan, issued.requests, result) if result.logprobs or result.prompt_logprobs else None
        for request, epoch, start, count, samples in zip(
            issued.requests, issued.epochs, plan.starts, plan.counts, plan.samples, strict=True
        ):
            token, vector = -1, b""
            if samples and request.pooling is None:
                token = next(tokens)
            elif samples:
                vector = next(vectors)
            if request.is_finished:
                continue
            if samples:
                request.tokens.append(token)
                request.pending -= 1
            if epoch == request.epoch and start + count - request.num_published >= page_size:
                self._publish(request, start + count)
            if vector:
                deltas.append(self._embedded(request, vector))
            elif samples:
                if len(request.tokens) >= request.max_len or token in request.stop_ids:
                    deltas.append(self._ended(request, token))
                else:
                    deltas.append(TokenDelta(request.id, request.index, [token]))
                if scores is not None:
                    deltas[-1] = scored(deltas[-1], request, scores)
        return deltas

    @property
    def num_steps(self) -> int:
        return self._step

    @property
    def is_idle(self) -> bool:
        return not self._groups

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

    # ── planning ──

    def _plan_running(self, draft: StepPlan, issued: _Issued) -> int:
        """Advance what runs. Returns the budget left, or −1 if somebody was preempted: then nobody may enter."""
        budget = self.max_step_tokens
        preemptions = self.num_preemptions
        for request in self.running[:]:
            if budget == 0:
                break
            length = len(request.tokens) + request.pending
            count = length - request.computed
            # row < 0: preempted a moment ago, by an older one. Sated: its last token is on its way.
            # count 0: a choice that waits to fork from its leader.
            if request.row < 0 or length >= request.max_len or count == 0:
                continue
            if count > budget:
                count = budget
            if request.computed + count > request.capacity and not self._grow(request, count, draft):
                continue
            self._issue(request, count, draft, issued)
            budget -= count
        return budget if preemptions == self.num_preemptions else -1

    def _plan_admissions(self, draft: StepPlan, issued: _Issued, budget: int) -> None:
        self.head_waits_for = None
        while (request := self.waiting.head()) is not None:
            self.head_waits_for = self._admit(request, budget, draft)
            if self.head_waits_for is not None:
                return
            count = min(request.length - request.computed, budget)
            self._issue(request, count, draft, issued)
            budget -= count

    def _admit(self, request: Request, budget: int, draft: StepPlan) -> WaitReason | None:
        """Give the request (and the choices that will fork from it) rows, and pages for every token it has."""
        # What must be computed whole waits for a step that has room for all of it; nobody overtakes it meanwhile.
        if budget < (request.length if request.is_whole else 1):
            return "budget"
        if len(self._free_rows) < 1 + len(request.followers):
            return "rows"
        assert request.pending == 0, "its last token has arrived: nobody enters in the step of a preemption"
        # Room for half of the running requests to grow by a page (in each group): entering only to be thrown out again
        # costs twice.
        spare = len(self.running) // 2 * len(self.cache.windows)
        if request.is_swapped:
            transfer = self.cache.swap_in(request.sequence, len(request.tokens), spare)
            if transfer is None:
                return "pages"
            for host, device in zip(transfer.host, transfer.device, strict=True):
                draft.moves.append(PageMove("in", host, device))
            pages = transfer.pages
            request.is_swapped = False
        else:
            admission = self.cache.admit(
                request.sequence, request.tokens, spare, reuse=not (request.is_whole or request.lacks_scores)
            )
            if admission is None:
                return "pages"
            pages = admission.pages
            request.computed = request.num_published = admission.num_cached
            if request.num_preemptions == 0:
                request.num_cached = min(
                    admission.num_cached, request.prompt_len
                )  # output is nothing that was asked for
        self.waiting.remove(request)
        self.admitted.append(request)
        self._seat(request)
        request.capacity = self.cache.capacity(request.sequence)
        draft.enters.append(self._entering(request, pages))
        for follower in request.followers:
            self._seat(follower)
            follower.computed = follower.prompt_len  # nothing to do until it forks
        return None

    def _issue(self, request: Request, count: int, draft: StepPlan, issued: _Issued) -> None:
        start = request.computed
        end = start + count
        samples = end == len(request.tokens) + request.pending
        draft.rows.append(request.row)
        draft.starts.append(start)
        draft.counts.append(count)
        draft.samples.append(samples)
        issued.requests.append(request)
        issued.epochs.append(request.epoch)
        request.computed = end
        if samples:
            request.pending += 1
        if count > 1:
            # Known tokens: later requests may share these pages from this very step on, because a step
            # writes all of its keys and values before any row reads them.
            self._publish(request, min(end, len(request.tokens)))
        if request.followers and end >= request.prompt_len:
            issued.forking.append(request)

    def _grow(self, request: Request, count: int, draft: StepPlan) -> bool:
        """Pages for `count` more tokens, preempting the youngest as needed. False: the request itself had to leave."""
        start, end = request.computed, request.computed + count
        while (growths := self.cache.extend(request.sequence, start, end)) is None:
            victim = self.running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        for growth in growths:
            if growth.copied is not None:
                draft.moves.append(PageMove("copy", growth.copied, growth.pages[0]))
            for slot, page in zip(growth.slots, growth.pages, strict=True):
                draft.page_rows.append(request.row)
                draft.page_slots.append(slot)
                draft.page_ids.append(page)
        if len(growths) > 1:
            draft.page_groups.extend(group for group, growth in enumerate(growths) for _ in growth.slots)
        request.capacity = self.cache.capacity(request.sequence)
        return True

    def _fork(self, leader: Request, draft: StepPlan) -> None:
        """The prompt is on its way: its other choices share all of it but the last token, which each computes for itself
        in the next step, to sample after it. They copy the page that they share with it when they write to it."""
        for follower in leader.followers:
            pages = self.cache.fork(leader.sequence, follower.sequence, leader.prompt_len - 1)
            follower.computed = follower.capacity = leader.prompt_len - 1
            follower.num_published = follower.computed // self.cache.page_size * self.cache.page_size
            follower.num_cached = leader.num_cached
            follower.num_scored = follower.prompt_len - 1  # the leader brings the prompt's
            draft.enters.append(self._entering(follower, pages))
        self.forked += leader.followers
        leader.followers = []

    def _publish(self, request: Request, computed: int) -> None:
        self.cache.publish(request.sequence, request.tokens, computed)
        request.num_published = computed // self.cache.page_size * self.cache.page_size

    def _entering(self, request: Request, pages: list[list[int]]) -> Entering:
        return Entering(
            request.row,
            list(request.tokens),
            request.prompt_len,
            request.params,
            request.seed,
            request.stop_ids,
            pages,
            request.pooling,
        )

    # ── coming and going ──

    def _seat(self, request: Request) -> None:
        request.row = self._free_rows.pop()
        insort(self.running, request, key=lambda running: running.sequence)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._leaves.append(request.row)
        self._free_rows.append(request.row)
        request.row = -1
        request.epoch += 1

    def _preempt(self, request: Request, draft: StepPlan) -> None:
        """Back to the queue, where it is older than all that wait; its tokens go to host pages or are computed again."""
        self.num_preemptions += 1
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

    def _ended(self, request: Request, token: int) -> TokenDelta:
        """The delta of a token that may be the last: a stop id, or the one that fills the request."""
        reason: FinishReason
        if token in request.stop_ids and len(request.tokens) >= request.min_len:
            reason, stop_token = "stop", token
        elif len(request.tokens) >= request.max_len:
            reason, stop_token = "length", None
        else:
            return TokenDelta(request.id, request.index, [token])
        self._finish(request)
        finish = Finish(reason, stop_token, request.num_cached, request.num_preemptions)
        return TokenDelta(request.id, request.index, [token], finish)

    def _embedded(self, request: Request, vector: bytes) -> TokenDelta:
        self._finish(request)
        finish = Finish("stop", None, request.num_cached, request.num_preemptions)
        return TokenDelta(request.id, request.index, [], finish, vector)

    def _failed(self, plan: StepPlan, issued: _Issued, result: StepResult) -> list[TokenDelta]:
        """End the requests whose token of this step does not count: they alone cannot go on."""
        sampling = _sampling(plan, issued)
        deltas = []
        for at, message in result.failures.items():
            if not (request := sampling[at]).is_finished:
                self._finish(request)
                finish = Finish("error", None, request.num_cached, request.num_preemptions, message)
                deltas.append(TokenDelta(request.id, request.index, [], finish))
        return deltas

    def _hand_over(self, leader: Request) -> None:
        """A leader is aborted alone, before its prompt is computed: each of its followers goes on as a request of its own."""
        for follower in leader.followers:
            if follower.row >= 0:
                self._leave(follower)
                self.returned.append(Returned(follower, 0, False))
            follower.computed = 0
            self.waiting.add(follower)
        leader.followers = []

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
        if request.is_swapped or request.sequence in self.cache.tables:
            self.cache.release(request.sequence)
        choices = self._groups[request.id]
        choices.remove(request)
        if not choices:
            del self._groups[request.id]


def _sampling(plan: StepPlan, issued: _Issued) -> list[Request]:
    """Whose tokens a step's result holds, in their order."""
    return [r for r, samples in zip(issued.requests, plan.samples, strict=True) if samples and r.pooling is None]
