"""Continuous batching, first come first served: plan() decides a step, commit() learns what it sampled.
Knows nothing of tensors, text, clocks or processes; one plan may be in flight while the next is made.

The one rule: a request has `length` tokens, `computed` of them done; a step gives it min(length − computed, budget).
Running requests come first, oldest first; then the queue's head is admitted while rows, pages and budget last.
When pages run out the youngest running request leaves first. So the oldest always advances, and nothing overtakes.
A request whose grammar is not ready stands aside, and enters the queue at its own place once it is.
"Oldest" is what the policy says it is: by default the order of arrival.
A request for a vector is one that ends when its prompt is computed; some must be computed whole, in one step.
A beam search's rows advance, are chosen and leave together; while its scores are on their way, it sits out a step."""

from collections import deque
from typing import Literal

import msgspec

from octavo.cache import KVCache
from octavo.messages import (
    Entering,
    Finish,
    GenerateRequest,
    Logprobs,
    PageMove,
    PoolingParams,
    StepPlan,
    StepResult,
    TokenDelta,
)
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.extras import progress_of, scored, take_scores
from octavo.schedule.outcome import Arrivals, Issued, finish_after
from octavo.schedule.policy import Policy, arrival
from octavo.schedule.request import Request
from octavo.schedule.rows import Seats

WaitReason = Literal["rows", "pages", "budget"]


class Scheduler(Seats):
    def __init__(
        self, cache: KVCache, max_rows: int, max_step_tokens: int, swap_min_tokens: int = 0, policy: Policy = arrival
    ) -> None:
        """`swap_min_tokens`: a preempted request with fewer computed tokens is computed again rather than swapped."""
        super().__init__(cache, max_rows, swap_min_tokens)
        assert not any(cache.windows) or max_step_tokens <= cache.max_step_tokens, "windows have room for smaller steps"
        self.max_step_tokens = max_step_tokens
        self.head_waits_for: WaitReason | None = (
            None  # why the queue's head was not admitted; all behind it wait for order
        )
        # What the last plan did, for those who keep the times; the rest is in Seats.
        self.admitted: list[Request] = []  # in the order of the plan's last rows
        self.forked: list[Request] = []
        self._policy = policy
        self.orders_by_wish = policy is not arrival  # a caller's wish, before the order of arrival
        self._in_flight: deque[Issued] = deque()
        self._next_sequence = 0
        self._step = 0

    # ── what the loop calls ──

    def add(self, source: GenerateRequest) -> None:
        params = source.params
        num_rows = params.num_sequences if params.use_beam_search else params.n
        assert num_rows <= self.max_rows, "refused at the door"
        if params.use_beam_search and source.begun:  # its answers come all at once: if it goes on, it has none
            source = msgspec.structs.replace(source, begun=[])
        assert not source.is_whole or len(source.prompt_ids) <= self.max_step_tokens, "refused at the door"
        # A beam is no choice before the end: those that keep the times take each for one of the n.
        choices = [Request(self._next_sequence + at, source, min(at, params.n - 1)) for at in range(num_rows)]
        for choice in choices:
            choice.rank = self._policy(source, choice.sequence)
        self._next_sequence += len(choices)
        if source.begun:
            choices = [choice for choice in choices if source.begun[choice.index] is not None]
        self._groups[source.id] = choices[:]
        if params.grammar:
            self.grammar_cache.hold(source.id, params.grammar)
        if any(choice.has_output for choice in choices):  # it outlived an engine: each goes on as if it was preempted
            for choice in choices:
                self._queue(choice)
            return
        leader = choices[0]
        if params.use_beam_search:
            group = BeamGroup(source, choices)
            assert group.most_pages(self.cache, self.max_step_tokens) <= self.cache.pool.num_pages, (
                "refused at the door"
            )
        else:
            leader.followers = choices[1:]
        if source.wants_progress:
            self._watched.add(leader.sequence)
        self._queue(leader)

    def abort(self, request_id: str, index: int = -1) -> bool:
        """Free everything that one choice (−1: every choice) of the request holds, now. False: there is none (any more), or
        it is a beam search, which has no choices before its end."""
        choices = [request for request in self._groups.get(request_id, ()) if index in (-1, request.index)]
        if index >= 0 and choices and isinstance(choices[0].special, BeamGroup):
            return False
        for request in choices:
            if index >= 0 and request.followers:
                self._hand_over(request)
            self._finish(request)
        return bool(choices)

    def plan(self) -> StepPlan:
        draft = StepPlan(self._step, self._leaves, [], [], [], [], [], [], [], [], [], [])
        issued = Issued([], [], [])
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
        arrived = Arrivals.of(result)
        tokens = arrived.tokens
        deltas = self._failed(plan, issued.requests, result) if result.failures else []
        if result.last:
            deltas += self._limited(plan, issued.requests, result)
        if self._watched:
            deltas += progress_of(plan, issued.requests, issued.epochs, self._watched)
        page_size = self.cache.page_size
        scores = take_scores(plan, issued.requests, result) if result.logprobs or result.prompt_logprobs else None
        for request, epoch, start, count, samples in zip(
            issued.requests, issued.epochs, plan.starts, plan.counts, plan.samples, strict=True
        ):
            if request.special is not None:
                deltas += self._commit_special(request, epoch, start + count, samples, arrived, scores)
                continue
            token = next(tokens) if samples else -1
            if request.is_finished:
                continue
            if samples:
                request.tokens.append(token)
                request.pending -= 1
            if epoch == request.epoch and start + count - request.num_published >= page_size:
                self._publish(request, start + count)
            if samples:
                if len(request.tokens) >= request.max_len or token in request.stop_ids:
                    deltas.append(self._last(request, token, finish_after(request, token)))
                else:
                    deltas.append(TokenDelta(request.id, request.index, [token]))
                if scores is not None:
                    deltas[-1] = scored(deltas[-1], request, scores)
        return deltas

    @property
    def num_steps(self) -> int:
        return self._step

    # ── planning ──

    def _plan_running(self, draft: StepPlan, issued: Issued) -> int:
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
            if request.computed + count > request.capacity:
                # A search claims no capacity, so that it is found here: others need not be asked at every step.
                if request.special is not None and isinstance(request.special, BeamGroup):
                    budget = self._plan_beams(request.special, budget, draft, issued)
                    continue
                if not self._grow(request, count, draft):
                    continue
            self._issue(request, count, draft, issued)
            budget -= count
        return budget if preemptions == self.num_preemptions else -1

    def _plan_admissions(self, draft: StepPlan, issued: Issued, budget: int) -> None:
        self.head_waits_for = None
        while (request := self.waiting.head()) is not None:
            self.head_waits_for = self._admit(request, budget, draft)
            if self.head_waits_for is not None:
                return
            if isinstance(request.special, BeamGroup):
                budget = self._plan_beams(request.special, budget, draft, issued)
                continue
            count = min(request.length - request.computed, budget)
            self._issue(request, count, draft, issued)
            budget -= count

    def _admit(self, request: Request, budget: int, draft: StepPlan) -> WaitReason | None:
        """Give the request (and the choices that will fork from it) rows, and pages for every token it has."""
        # What must be computed whole waits for a step that has room for all of it; nobody overtakes it meanwhile.
        if budget < (request.length if request.is_whole else 1):
            return "budget"
        beams = request.special if isinstance(request.special, BeamGroup) else None
        others = request.followers if beams is None else beams.others
        if len(self._free_rows) < 1 + len(others):
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
                request.sequence,
                request.tokens if beams is None else request.tokens[: request.prompt_len],
                spare,
                reuse=not (request.is_whole or request.lacks_scores),
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
        if beams is None:
            request.capacity = self.cache.capacity(request.sequence)
        else:
            beams.told(request, pages)
        draft.enters.append(self._entering(request, pages))
        for other in others:
            self._seat(other)
            other.computed = other.length  # nothing to do until it forks
        return None

    def _issue(self, request: Request, count: int, draft: StepPlan, issued: Issued) -> None:
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
        growths = self._extend(request, count, draft)
        if growths is None:
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

    def _plan_beams(self, group: BeamGroup, budget: int, draft: StepPlan, issued: Issued) -> int:
        """Advance all beams, or the prompt that they share. Returns the budget left. Pages first: a group leaves as a whole, and
        must not when some of it is in the plan already."""
        leader, left = group.leader, budget
        if not group.is_spread and leader.computed >= leader.prompt_len:
            group.spread(self.cache)
        counts = []
        for request in group.requests if group.is_spread else [leader]:
            end = request.length if group.is_spread else request.prompt_len
            if count := min(end - request.computed, left):
                counts.append((request, count))
                left -= count
        for request, count in counts:
            growths = self._extend(request, count, draft)
            if growths is None:
                return budget
            for growth in growths:
                if growth.copied is not None:
                    draft.moves.append(PageMove("copy", growth.copied, growth.pages[0]))
        for request, pages in group.tell(self.cache, draft):
            draft.enters.append(self._entering(request, pages))
            if not leader.num_preemptions and request.sequence - leader.sequence < leader.params.n:
                self.forked.append(request)
        for request, count in counts:
            self._issue(request, count, draft, issued)
            request.pending = 0  # the search chooses its token, not the sampler
        return left

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

    # ── what came of a step ──

    def _commit_special(
        self,
        request: Request,
        epoch: int,
        end: int,
        samples: bool,
        arrived: Arrivals,
        scores: dict[int, Logprobs] | None,
    ) -> list[TokenDelta]:
        """`end`: how far the step computed it."""
        special = request.special
        token = next(arrived.tokens) if samples and not isinstance(special, PoolingParams) else -1
        vector = next(arrived.vectors) if samples and isinstance(special, PoolingParams) else b""
        candidates = next(arrived.candidates) if samples and isinstance(special, BeamGroup) else None
        if request.is_finished:
            return []
        is_current = epoch == request.epoch
        if isinstance(special, BeamGroup):
            # What a group computed before it was thrown out is computed again, all of it.
            if candidates is None or not is_current or not special.take(request, candidates):
                return []
            return [] if special.advance(self.cache) else self._end_beams(special)
        if is_current and end - request.num_published >= self.cache.page_size:
            self._publish(request, end)
        if not samples:
            return []
        request.pending -= 1
        request.tokens.append(token)
        if isinstance(special, PoolingParams):
            finish = Finish("stop", None, request.num_cached, request.num_preemptions)
            self._finish(request)
            return [TokenDelta(request.id, request.index, [], finish, vector)]
        assert special is not None
        delta = self._last(request, token, finish_after(request, token, special.add(token)))
        return [delta if scores is None else scored(delta, request, scores)]

    def _last(self, request: Request, token: int, finish: Finish | None) -> TokenDelta:
        """The delta of a token that may be the last."""
        if finish is not None:
            self._finish(request)
        return TokenDelta(request.id, request.index, [token], finish)

    def _end_beams(self, group: BeamGroup) -> list[TokenDelta]:
        for request in group.requests:
            self._finish(request)
        return group.deltas(group.leader.params.n)
