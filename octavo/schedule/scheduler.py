"""Continuous batching, first come first served: plan() decides a step, commit() takes in what it sampled. One plan may be in flight
while the next is made; where plans go through several stages, as many as there are stages.

The one rule: a request has `length` tokens, `computed` of them done; a step gives it min(length − computed, budget).
A prompt token whose logprobs are wanted takes as much of the budget as several others.
Beside running streams, a step computes only so much of prompts that it takes no longer than a limit (stall_limit.py).
Running requests come first, oldest first; then the queue's head is admitted while rows, pages and budget last.
When pages run out the youngest running request is preempted. So the oldest always advances, and none is overtaken.
"Oldest" is what the policy says it is: by default the order of arrival over responses, each of which has one primary sequence at a time.
Its other sequences are younger than all primaries, and give way: a primary is admitted before they advance, and in their place.
A request whose grammar is not ready stays out of the queue, and enters it at its own place once the grammar is.
A request for a vector ends when its prompt is computed; some must be computed whole, in one step.
A beam search's rows advance, are chosen and leave together; while its scores are on their way, it sits out a step.
A row may compute drafted tokens behind its last one, and gets as many tokens as the draft was right, and one (decision 048). While
they are on their way its length is not known, and it sits out.
A row whose mask was late has sampled nothing: it computes its last token again, in a later step, and samples after that.
With several stages (pipeline parallelism) the first one does not see what the last one samples: a row that waits for a token is in no
other plan, and the running rows are spread over the plans in flight, so that every stage has one (decision 045)."""

import math
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from octavo.cache import Growth, KVCache
from octavo.messages import (
    FROM_MODEL,
    NO_INPUT,
    Candidates,
    Draft,
    Entering,
    Finish,
    GenerateRequest,
    Logprobs,
    PageMove,
    PoolingParams,
    StepPlan,
    StepResult,
    TokenDelta,
    most_samples,
)
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.drafts.base import Speculation
from octavo.schedule.extras import prefill_progress, prompt_scores, scored, take_scores
from octavo.schedule.fairness import Fairness
from octavo.schedule.grammar_cache import MAX_BYTES, MAX_UNUSED, GrammarCache
from octavo.schedule.policy import Policy, Siblings, WaitingQueue, arrival
from octavo.schedule.repetition import Loops
from octavo.schedule.request import SCORED_COST, Request
from octavo.schedule.results import Added, Committed, GrammarsReady, HeadWaitReason, Planned, Removed, Returned
from octavo.schedule.rows import Rows, order_of
from octavo.schedule.stall_limit import MIN_PROMPT_TOKENS, MIN_SHARE, UNKNOWN_PART, PromptAllowance, StallLimit
from octavo.schedule.step_costs import NO_COSTS, UNBOUNDED, StepCosts, StepShape

# Plans that a row with a late mask sits out: none after the first late step, then one, then twice as many each time, up to this. It
# sits out none if there is nothing else to compute.
MAX_SIT_OUT = 8


class _Columns(NamedTuple):
    """A result's columns. Each holds the values of those sampling rows that have one, in the plan's order."""

    tokens: Iterator[int]
    vectors: Iterator[bytes]
    candidates: Iterator[Candidates]
    runs: Iterator[int]  # numbers of tokens
    drafted: Iterator[int]  # … that the draft model proposed


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        max_rows: int,
        max_step_tokens: int,
        swap_min_tokens: int = 0,
        policy: Policy = arrival,
        stall_limit: StallLimit | None = None,
        num_stages: int = 1,
        speculation: Speculation | None = None,
        fairness: Fairness | None = None,
        max_grammar_bytes: int = MAX_BYTES,
    ) -> None:
        """`swap_min_tokens`: a preempted request with fewer computed tokens is computed again rather than swapped. `stall_limit`: None:
        a step may take any time. `num_stages`: that every plan goes through; as many plans may be in flight while the next is made.
        `speculation`: None: no request drafts; nor does any with several stages. `fairness`: None: tenants are not told apart.
        `max_grammar_bytes`: that the grammars of open requests take before others wait."""
        assert fairness is None or policy is arrival, (
            "within a tenant, requests are served in the order of their arrival"
        )
        assert not any(cache.windows) or max_step_tokens <= cache.max_step_tokens, "windows have room for smaller steps"
        self.cache, self.max_rows, self.max_step_tokens = cache, max_rows, max_step_tokens
        self.swap_min_tokens = swap_min_tokens
        self.fairness = fairness
        self.rows = Rows(max_rows, None if fairness is None else fairness.waiting)
        self.siblings = Siblings()
        self.grammar_cache = GrammarCache(max_rows + MAX_UNUSED, max_bytes=max_grammar_bytes)
        self.num_preemptions = 0
        # Why the queue's head was not admitted by the last plan. All behind it wait for it.
        self.head_waits_for: HeadWaitReason | None = None
        self.has_priorities = policy is not arrival  # ranks are what clients ask for, not the order of arrival
        self._policy = policy
        self._open: dict[str, list[Request]] = {}  # request id → its choices that are not finished
        self._watched: set[int] = set()  # sequences of requests that asked for the progress of their prompt
        self._in_flight: deque[Planned] = deque()
        self._next_sequence = 0
        self.num_steps = 0  # plans that are to be carried out, so far
        self.stall_limit = stall_limit
        self.num_stages = num_stages
        self.speculation = speculation if num_stages == 1 else None
        self.costs: StepCosts | None = None  # None: not known yet
        self._allowance: PromptAllowance | None = None  # of the plan that is being made; None: it has no prompts yet
        self._num_decodes = self._most_decodes = 0  # rows of that plan that compute one token; only with several stages
        # Rows that compute one token and are not in that plan yet: prompts of tenants that come before them leave room for them.
        # None: not counted, because no prompt needs to know.
        self._num_reserved: int | None = None

    # ── verbs ──

    def add(self, source: GenerateRequest) -> Added:
        params = source.params
        num_sequences = params.num_sequences if params.use_beam_search else params.n
        assert not params.use_beam_search or num_sequences <= self.max_rows, "refused at admission"
        if params.use_beam_search and source.begun:  # its answers come all at once: if it goes on, it has none
            source = msgspec.structs.replace(source, begun=[])
        assert not source.needs_one_step or len(source.prompt_ids) <= self.max_step_tokens, "refused at admission"
        # A beam is no choice before the end: observers take each for one of the n.
        choices = [Request(self._next_sequence + at, source, min(at, params.n - 1)) for at in range(num_sequences)]
        self._next_sequence += len(choices)
        if source.begun:
            choices = [choice for choice in choices if source.begun[choice.index] is not None]
        rank = self._policy(source)
        for choice in choices:
            choice.rank = rank
            if self.fairness is not None:
                self.fairness.join(choice, source.tenant, source.weight)
            if self.speculation is not None:
                self.speculation.attach(choice)
            if not params.use_beam_search:
                self.siblings.join(choice)
        self._open[source.id] = choices[:]
        job = self.grammar_cache.hold(source.id, params.grammar) if params.grammar else None
        added = Added(self._awaits_grammar(choices[0]), [] if job is None else [job])
        if source.begun and any(
            choice.has_output for choice in choices
        ):  # it outlived an engine: each goes on as if it was preempted
            for choice in choices:
                self._queue(choice)
            return added
        leader = choices[0]
        if params.use_beam_search:
            self.siblings.join(leader)
            group = BeamGroup(source, choices)
            group.follow_leader()
            most_pages = group.most_pages(self.cache, self.max_step_tokens)
            assert most_pages <= self.cache.pool.num_pages, "refused at admission"
        else:
            leader.followers = choices[1:]
        if source.wants_progress:
            self._watched.add(leader.sequence)
        self._queue(leader)
        return added

    def abort(self, request_id: str, index: int = -1) -> Removed | None:
        """Free everything that one choice (−1: every choice) of the request holds, now. None: there is no such choice (any more),
        or it is a beam search, which has no choices before its end."""
        choices = [request for request in self._open.get(request_id, ()) if index in (-1, request.index)]
        if not choices or (index >= 0 and isinstance(choices[0].special, BeamGroup)):
            return None
        removed = Removed([], [], [], [])
        for request in choices:
            if index >= 0 and request.followers:
                self._hand_over(request, removed)
            self._finish(request, removed)
        return removed

    def prepared(self, grammars: dict[str, int]) -> GrammarsReady:
        """Grammars are ready, and with them the requests that wait for nothing else. Each with the bytes that it takes."""
        ready = GrammarsReady(grammars, [], [])
        for grammar, num_bytes in grammars.items():
            job = self.grammar_cache.prepared(grammar, num_bytes)
            ready.jobs += [] if job is None else [job]
            same = [request for request in self.rows.awaiting_grammar.values() if request.params.grammar == grammar]
            ready.let_in += self._let_in(same)
        return ready

    def learn(self, costs: StepCosts) -> None:
        """What steps were measured to cost, for the plans from now on."""
        self.costs = costs

    def plan(self) -> Planned:
        draft = StepPlan(self.num_steps, [], [], [], [], [], [], [], [], [], [], [])
        planned = Planned(draft, [], [], [], [], [], [])
        resting: list[Request] = []
        self._allowance, self._num_decodes = None, 0
        if self.fairness is not None:
            if self.fairness.rank_all():
                self.rows.sort()
            self._num_reserved = None
        if self.num_stages > 1:
            self._most_decodes = self._share_of_rows()
        self._plan_in_order(draft, planned, resting)
        if resting and not planned.returned and not draft.rows and not self._in_flight:
            self._plan_late(resting[: self.max_step_tokens], draft, planned)
        self.head_waits_for = planned.head_waits_for
        if (allowance := self._allowance) is not None and allowance.capped is not None:
            planned.capped = allowance.capped
            planned.limit_seconds = 0.0 if math.isinf(allowance.limit) else allowance.limit
        if self.speculation is not None and draft.rows:
            self._speculate(self.speculation, draft, planned)
        if planned.forking:  # last: a choice reads what its leader writes, so it may start in the next step
            self._fork_all(draft, planned)
        planned.num_tokens = sum(draft.counts)
        if self.fairness is not None:
            self.fairness.charge(planned)
        planned.is_empty = not planned.num_tokens and not draft.moves
        if planned.is_empty:
            draft.leaves.extend(self.rows.left)  # the next plan that is carried out names them again
        else:
            if self.rows.left:
                draft.leaves.extend(self.rows.take_left())
            self._in_flight.append(planned)
            self.num_steps += 1
        if self.cache.pool.changes is not None:
            planned.pages = self.cache.take_changes()
        return planned

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Apply the oldest uncommitted plan's tokens. Rows whose request has since finished are ignored."""
        planned = self._in_flight.popleft()
        requests, epochs = planned.requests, planned.epochs
        deltas: list[TokenDelta] = []
        committed = Committed(plan, result, planned.num_tokens, deltas, [], [], [])
        arrived = _Columns(
            iter(result.tokens), iter(result.vectors), iter(result.candidates), iter(result.runs), iter(result.drafted)
        )
        tokens = arrived.tokens
        if result.failures:
            self._fail(planned.sampling(result), committed)
        if result.last:
            self._limit(planned.sampling(result), committed)
        late: set[int] = set()
        if result.late:
            sampling = planned.sampling(result)
            late = {sampling[at].sequence for at in result.late}
        if self._watched:
            deltas += prefill_progress(plan, requests, epochs, self._watched)
        page_size = self.cache.page_size
        scores = take_scores(plan, requests, result) if result.logprobs or result.prompt_logprobs else None
        if result.prompt_logprobs:
            deltas += prompt_scores(plan, requests)
        for request, epoch, start, count, samples in zip(
            requests, epochs, plan.starts, plan.counts, plan.samples, strict=True
        ):
            if request.drafted:
                deltas += self._commit_run(request, epoch, arrived, scores, late, committed)
                continue
            if request.special is not None:
                deltas += self._commit_special(request, epoch, start + count, samples, arrived, scores, late, committed)
                continue
            token = next(tokens) if samples else -1
            if request.is_finished:
                continue
            if late and request.sequence in late:
                self._commit_late(request, epoch)
                continue
            if samples:
                request.tokens.append(token)
                request.pending -= 1
            if epoch == request.epoch and start + count - request.num_published >= page_size:
                self._publish(request, start + count)
            if samples:
                if len(request.tokens) >= request.max_len or token in request.stop_ids:
                    deltas.append(self._last(request, token, request.finish_after(token), committed))
                else:
                    deltas.append(TokenDelta(request.id, request.index, [token]))
                if scores is not None:
                    deltas[-1] = scored(deltas[-1], request, scores)
        if self.cache.pool.changes is not None:
            committed.pages = self.cache.take_changes()
        return committed

    # ── what it looks like between two steps ──

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def has_work(self) -> bool:
        """Whether a plan could advance or admit a request. Those that wait for a grammar do not count."""
        rows = self.rows
        return bool(rows.running or rows.waiting)

    @property
    def running(self) -> list[Request]:
        return self.rows.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.rows.waiting

    @property
    def awaiting_grammar(self) -> dict[int, Request]:
        return self.rows.awaiting_grammar

    @property
    def num_waiting(self) -> int:
        return self.rows.num_waiting

    def has(self, request_id: str) -> bool:
        return request_id in self._open

    def request_ids(self) -> list[str]:
        return list(self._open)

    def choices(self, request_id: str) -> list[Request]:
        """Those of a request that are not finished."""
        return list(self._open.get(request_id, ()))

    def requests(self) -> Iterator[Request]:
        """Every choice that is not finished."""
        return (choice for choices in self._open.values() for choice in choices)

    def slot_use(self) -> tuple[int, int]:
        """(slots that hold a token, slots allocated), over the pages owned now. Walks every page: not for every step."""
        page_size = self.cache.page_size
        filled: dict[int, int] = {}
        for request in self.rows.running:
            for table in self.cache.tables.get(request.sequence, ()):
                num_full = max(request.computed // page_size - table.first, 0)
                filled.update(dict.fromkeys(table.pages[:num_full], page_size))
                for i, page in enumerate(table.pages[num_full:], table.first + num_full):
                    filled[page] = max(filled.get(page, 0), request.computed - i * page_size, 0)
        return sum(filled.values()), len(filled) * page_size

    # ── planning ──

    def _plan_in_order(self, draft: StepPlan, planned: Planned, resting: list[Request]) -> None:
        """Go from the oldest to the youngest: advance those that run, and admit a primary where younger sequences run that it
        comes before. Then admit from the queue; none enters in the step of a preemption but the primaries that others were preempted
        for.
        `resting`: gets those that sit out this plan because their masks were late."""
        rows, running = self.rows, self.rows.running[:]
        budget, num_done, is_full = self.max_step_tokens, 0, False
        while (primary := rows.waiting.head()) is not None and self._comes_before_running(primary, planned):
            if self.fairness is not None and not rows.free and not self.fairness.may_displace(primary):
                is_full = True  # as in most plans, where tenants wait: no need to stop at its place
                break
            num_returned, num_older = len(planned.returned), bisect(running, primary.order, key=order_of)
            budget = self._advance(running[num_done:num_older], budget, draft, planned, resting)
            num_done = num_older
            if len(planned.returned) > num_returned:  # older ones have run out of pages
                break
            planned.head_waits_for = self._admit_primary(primary, budget, draft, planned)
            if planned.head_waits_for is not None:
                planned.head = primary
                break
            budget = self._begin(primary, budget, draft, planned)
        budget = self._advance(running[num_done:], budget, draft, planned, resting)
        if planned.head is None and planned.returned:
            planned.head, planned.head_waits_for = rows.waiting.head(), "pages" if rows.free else "rows"
        elif is_full:
            planned.head, planned.head_waits_for = primary, "rows"
        elif planned.head is None:
            self._plan_admissions(draft, planned, budget)

    def _comes_before_running(self, request: Request, planned: Planned) -> bool:
        """Whether it is the primary of its response and older than a request that runs. What was preempted in this step stays out of it:
        its last token may be on its way."""
        running = self.rows.running
        if not request.is_primary or not running or running[-1].order < request.order:
            return False
        if self.fairness is not None:
            return not planned.returned or all(returned.request is not request for returned in planned.returned)
        return not (planned.returned and request.gives_way)

    def _advance(
        self, running: list[Request], budget: int, draft: StepPlan, planned: Planned, resting: list[Request]
    ) -> int:
        """Advance requests that run, oldest first. Returns the budget left."""
        search: BeamGroup | None = None  # the last that was planned: its beams are next to each other
        is_pipelined = self.num_stages > 1
        for request in running:
            if budget == 0:
                break
            length = len(request.tokens) + request.pending
            count = length - request.computed
            # row < 0: preempted a moment ago, for an older one. length ≥ max_len: its last token is on its way.
            # count ≤ 0: a beam whose scores are on their way, or a request with a draft in flight.
            if request.row < 0 or length >= request.max_len or count <= 0:
                continue
            cost = count
            if is_pipelined and count == 1 and not self._has_turn(request):
                continue
            if count > 1:
                if isinstance(request.special, BeamGroup):
                    if request.special is not search:
                        search = request.special
                        budget = self._plan_beams(search, budget, draft, planned)
                    continue
                if (
                    request.late_steps and not request.capacity
                ):  # late, and a step planned before is in flight: see below
                    continue
                count, cost = self._share(request, count, budget, draft)
                if not count:
                    continue
            if request.computed + count > request.capacity:
                # A search has a capacity of 0, and so has a request whose mask was late, so that they always come here: other
                # requests need not be checked at every step.
                if request.special is not None and isinstance(request.special, BeamGroup):
                    if request.special is not search:
                        search = request.special
                        budget = self._plan_beams(search, budget, draft, planned)
                    continue
                if not request.capacity and request.late_steps:
                    if request.pending:  # a step that was planned before it was known to be late is still in flight
                        continue
                    if request.sits_out:
                        request.sits_out -= 1
                        resting.append(request)
                        continue
                    if not self.cache.sees(request.sequence, request.computed):
                        self._preempt(request, draft, planned)
                        continue
                if not self._grow(request, count, draft, planned):
                    continue
            self._issue(request, count, draft, planned)
            budget -= cost
        return budget

    def _has_turn(self, request: Request) -> bool:
        """Whether a row that computes one token may be in this plan, where plans go through several stages. Not if the token is on its
        way; nor if the plan has its share of the rows, so that the next plan has some, too.

        A row that is left out for that is in one of the next `num_stages` plans: no other row has two turns meanwhile, and all of these
        plans together have room for every row. Where tenants are told apart, rows of a tenant that was served less go first, and others
        may wait some plans more, until theirs was served less."""
        if isinstance(request.special, BeamGroup):
            return True  # a search advances as a whole
        return not request.pending and self._num_decodes < self._most_decodes

    def _share_of_rows(self) -> int:
        """How many rows that compute one token a plan may have: its share of all that run and, until as many plans are in flight as
        there are stages, of those that are not in one of them."""
        rows = self.rows.running
        num_ready = sum(not request.pending and request.length - request.computed == 1 for request in rows)
        num_missing = max(1, self._num_turns - len(self._in_flight))  # plans, with this one
        return min(-(-len(rows) // self._num_turns), -(-num_ready // num_missing))

    def _plan_late(self, resting: list[Request], draft: StepPlan, planned: Planned) -> None:
        """Advance requests that would sit out this plan: there is nothing else to compute."""
        for request in resting:
            request.sits_out = 0
            if request.row < 0:  # preempted a moment ago
                continue
            if not self.cache.sees(request.sequence, request.computed):
                self._preempt(request, draft, planned)
            elif self._grow(request, 1, draft, planned):
                self._issue(request, 1, draft, planned)

    def _plan_admissions(self, draft: StepPlan, planned: Planned, budget: int) -> None:
        while (request := self.rows.waiting.head()) is not None:
            planned.head_waits_for = self._admit(request, budget, draft, planned)
            if planned.head_waits_for is not None:
                planned.head = request
                return
            budget = self._begin(request, budget, draft, planned)

    def _begin(self, request: Request, budget: int, draft: StepPlan, planned: Planned) -> int:
        """Compute the first tokens of a request that was admitted. Returns the budget left."""
        if isinstance(request.special, BeamGroup):
            return self._plan_beams(request.special, budget, draft, planned, is_new=True)
        count, cost = self._share(request, request.length - request.computed, budget, draft, is_new=True)
        self._issue(request, count, draft, planned)
        return budget - cost

    def _admit_primary(self, primary: Request, budget: int, draft: StepPlan, planned: Planned) -> HeadWaitReason | None:
        """Admit a primary before the younger sequences that run, none of which is in the plan yet. If it lacks rows or pages, those
        that give way are preempted, youngest first; none is where all of them together do not hold what it lacks. Sequences of
        tenants that hold too many rows give way as well."""
        lacks = self._admit(primary, budget, draft, planned)
        if lacks is None or lacks in ("budget", "streams"):  # preempting others would give it neither
            return lacks
        if self.fairness is not None:
            younger = self.fairness.victims(primary, self.rows.running)
        else:
            younger = [request for request in self.rows.running if request.gives_way and request.order > primary.order]
        if not self._would_fit(primary, younger):
            return lacks
        while lacks is not None and younger:
            victim = younger.pop()
            if victim.row >= 0:  # else preempted with its search
                self._preempt(victim, draft, planned)
                lacks = self._admit(primary, budget, draft, planned)
        return lacks

    def _would_fit(self, primary: Request, younger: list[Request]) -> bool:
        """Whether the primary might be admitted if none of these ran. Pages that they share count once for each."""
        beams = primary.special if isinstance(primary.special, BeamGroup) else None
        if len(self.rows.free) + len(younger) < (1 if beams is None else len(beams.requests)):
            return False
        tables = (self.cache.tables.get(request.sequence, ()) for request in younger)
        num_held = sum(len(table.pages) for of_request in tables for table in of_request)
        tokens = primary.tokens if beams is None else primary.tokens[: primary.prompt_len]
        adapter = primary.params.prefix_space
        return self.cache.num_missing(primary.sequence, tokens, reuse=primary.may_reuse, adapter=adapter) <= num_held

    def _admit(self, request: Request, budget: int, draft: StepPlan, planned: Planned) -> HeadWaitReason | None:
        """Give the request (and the beams of its search) rows, and pages for every token it has."""
        # A prompt that must be computed whole waits for a step that has room for all of it; none overtakes it meanwhile.
        if budget < (request.length if request.needs_one_step else 1):
            return "budget"
        if request.pending and self.num_stages > 1:  # it was preempted, and its last token is still in a later stage
            return "budget"
        beams = request.special if isinstance(request.special, BeamGroup) else None
        others = [] if beams is None else beams.others
        if len(self.rows.free) < 1 + len(others):
            return "rows"
        if not self._may_begin(request, draft):
            return "streams"
        assert request.pending == 0, "its last token has arrived: none enters in the step of a preemption"
        # Room for half of the running requests to grow by a page (in each group): to be admitted and preempted at once
        # costs twice.
        spare = len(self.rows.running) // 2 * len(self.cache.windows)
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
                reuse=request.may_reuse,
                adapter=request.params.prefix_space,
            )
            if admission is None:
                return "pages"
            pages = admission.pages
            request.computed = request.num_published = admission.num_cached
            if request.num_cached < 0:
                # Output of an earlier engine may be found too, but only the prompt counts.
                request.num_cached = min(admission.num_cached, request.prompt_len)
                request.miss = admission.miss
        planned.admitted.append(request)
        self.rows.seat(request)
        if beams is None:
            request.capacity = self.cache.capacity(request.sequence)
        else:
            beams.note_entered(request, pages)
        draft.enters.append(self._entering(request, pages))
        for other in others:
            self.rows.seat(other)
            other.computed = other.length  # nothing to do until it forks
        return None

    # ── prompts beside running streams ──

    def _share(
        self, request: Request, count: int, budget: int, draft: StepPlan, is_new: bool = False
    ) -> tuple[int, int]:
        """(how many of its next `count` tokens the request may compute in this step, what they take of the budget). (0, 0): it waits,
        because running streams do. `is_new`: it was admitted by this plan."""
        if (
            count > 1
            and self.fairness is not None
            and not request.needs_one_step
            and count * SCORED_COST > budget - len(self.rows.running)  # else there is room for all
        ):
            budget = max(1, budget - self._count_reserved(draft))
        if count > 1 and self.stall_limit is not None:
            return self._allow(draft, self.stall_limit).share(request, count, budget, is_new)
        return request.share(count, budget)

    def _count_reserved(self, draft: StepPlan) -> int:
        if self._num_reserved is None:
            planned = set(draft.rows)
            self._num_reserved = sum(
                request.row not in planned
                and request.length - request.computed == 1
                and request.length < request.max_len
                for request in self.rows.running
            )
        return self._num_reserved

    def _may_begin(self, request: Request, draft: StepPlan) -> bool:
        """Whether a request that has no row yet could compute a part of its prompt in this step."""
        if self.stall_limit is None:
            return True
        if request.is_swapped and request.length - request.computed == 1:
            return True
        return self._allow(draft, self.stall_limit).admits(request)

    def _allow(self, draft: StepPlan, stall_limit: StallLimit) -> PromptAllowance:
        """What this plan may compute of prompts. Found when the first prompt is planned: most plans have none."""
        if self._allowance is None:
            planned = set(draft.rows)  # these have been advanced: each by one token, for all others are prompts
            num_rows = num_streams = context = 0
            for request in self.rows.running:
                is_planned, length = request.row in planned, len(request.tokens) + request.pending
                if request.pending and not is_planned and self.num_stages > 1:  # in another plan
                    continue
                if is_planned or (length - request.computed == 1 and length < request.max_len):
                    num_rows += 1
                    context += request.computed - is_planned
                    has_output = length - is_planned > request.prompt_len
                    num_streams += has_output and not isinstance(request.special, BeamGroup)
            costs, tokens = self.costs, self.max_step_tokens - num_rows
            if not num_streams:
                self._allowance = PromptAllowance(NO_COSTS, math.inf, 0.0, UNBOUNDED)
            elif costs is None:
                self._allowance = PromptAllowance(NO_COSTS, math.inf, 0.0, tokens // UNKNOWN_PART)
            else:
                seconds = costs.seconds(StepShape(num_rows, 0, context, 0))
                # A stream gets a token from one of the plans in flight, and every one of them may have prompts.
                limit = stall_limit.within(costs, seconds * self._num_turns) / self._num_turns
                self._allowance = PromptAllowance(costs, limit, seconds, tokens)
        return self._allowance

    @property
    def _num_turns(self) -> int:
        """Plans from one token of a row to the next."""
        return 1 if self.num_stages == 1 else self.num_stages + 1

    def _issue(self, request: Request, count: int, draft: StepPlan, planned: Planned) -> None:
        start = request.computed
        end = start + count
        samples = end == len(request.tokens) + request.pending
        draft.rows.append(request.row)
        draft.starts.append(start)
        draft.counts.append(count)
        draft.samples.append(samples)
        planned.requests.append(request)
        planned.epochs.append(request.epoch)
        if self.num_stages > 1:
            has_input = start >= request.prompt_len and not isinstance(request.special, BeamGroup)
            draft.inputs.append(request.tokens[start] if has_input else NO_INPUT)
            # Beside rows of other tenants a prompt may get one token of a step: it is no row that waits for its turn.
            self._num_decodes += count == 1 and (samples or self.fairness is None)
        request.computed = end
        if self._num_reserved and count == 1 and samples:
            self._num_reserved -= 1
        if samples:
            request.pending += 1
        if count > 1:
            # Known tokens: later requests may share these pages from this very step on, because a step
            # writes all of its keys and values before any row reads them.
            self._publish(request, min(end, len(request.tokens)))
        if request.followers and end >= request.prompt_len:
            planned.forking.append(request)

    def _grow(self, request: Request, count: int, draft: StepPlan, planned: Planned) -> bool:
        """Get pages for `count` more tokens, preempting the youngest as needed. False: the request itself was preempted."""
        growths = self._extend(request, count, draft, planned)
        if growths is None:
            return False
        self._note_growths(request, growths, draft)
        return True

    def _note_growths(self, request: Request, growths: list[Growth], draft: StepPlan) -> None:
        """The request has got pages: the plan names them."""
        for growth in growths:
            if growth.copied is not None:
                draft.moves.append(PageMove("copy", growth.copied, growth.pages[0]))
            for entry, page in zip(growth.entries, growth.pages, strict=True):
                draft.page_rows.append(request.row)
                draft.page_entries.append(entry)
                draft.page_ids.append(page)
        if len(growths) > 1:
            draft.page_groups.extend(group for group, growth in enumerate(growths) for _ in growth.entries)
        request.capacity = self.cache.capacity(request.sequence)

    # ── drafts ──

    def _speculate(self, speculation: Speculation, draft: StepPlan, planned: Planned) -> None:
        """Add drafts to a plan that is otherwise complete, from what is left of the step's tokens and of free pages. They continue the
        last token, so all tokens must be known: nothing may be in flight. Plans with prompts have none: these take all that the limit
        leaves. With drafts a step keeps to it, too: a row whose draft is wrong waits for those of the others."""
        num_rows = len(draft.rows)
        if sum(draft.counts) > num_rows or planned.forking:
            return
        shape = StepShape(num_rows, 0, sum(draft.starts), 0)
        if not self._in_flight:
            room = min(self.max_step_tokens, most_samples(self.max_rows)) - num_rows
            rows = [
                (at, request)
                for at, (request, samples) in enumerate(zip(planned.requests, draft.samples, strict=True))
                if request.drafter is not None and samples and request.late_at != len(request.tokens) - 1
            ]
            if rows and room > 0:
                chosen = speculation.choose(rows, shape, self.costs, room, self.stall_limit)
                num_by_model = sum(each.tokens[0] == FROM_MODEL for each in chosen)
                catch_up = self._catch_up(shape, num_by_model) if num_by_model else 0
                for each in chosen:
                    of_row = catch_up if each.tokens[0] == FROM_MODEL else 0
                    self._add_draft(each, draft, planned.requests[each.at], of_row)
            # Where none was worth it now, the next plan may be made while this one is on its way.
            planned.wants_drain = bool(draft.drafts)
        else:
            planned.wants_drain = speculation.wants_drain(self.num_steps, planned.requests, shape, self.costs)

    def _catch_up(self, shape: StepShape, num_drafts: int) -> int:
        """How many tokens of each of these rows the draft model may compute in this step to catch up: as many as prompts might, because
        streams wait for both."""
        costs, total = self.costs, self.max_step_tokens
        if self.stall_limit is not None and costs is None:
            total //= UNKNOWN_PART
        elif self.stall_limit is not None and costs is not None and costs.draft:
            seconds = costs.seconds(shape)
            left = max(self.stall_limit.planned_within(costs, seconds) - seconds, MIN_SHARE * seconds)
            total = min(total, costs.tokens_within(left / costs.draft, shape.context // shape.rows))
        return max(MIN_PROMPT_TOKENS, total // num_drafts)

    def _add_draft(self, wanted: Draft, draft: StepPlan, request: Request, catch_up: int) -> None:
        """Let a row verify a draft behind the token that it computes, as far as there are pages. None is preempted for it."""
        start, tokens = request.computed, wanted.tokens
        assert request.pending == 1 and start + len(tokens) < request.max_len
        if start + len(tokens) > request.capacity:
            # From the row's own token on: a window keeps what that token sees.
            growths = self.cache.extend(request.sequence, start - 1, start + len(tokens))
            if growths is None:
                tokens = tokens[: request.capacity - start]
            else:
                self._note_growths(request, growths, draft)
        if tokens:
            draft.drafts.append(Draft(wanted.at, tokens, catch_up))
            draft.counts[wanted.at] += len(tokens)
            request.drafted = len(tokens)
            request.draft_source = min(tokens[0], 0)
            request.computed += len(tokens)

    def _commit_run(
        self,
        request: Request,
        epoch: int,
        arrived: _Columns,
        scores: dict[int, tuple[Logprobs, ...]] | None,
        late: set[int],
        committed: Committed,
    ) -> list[TokenDelta]:
        """Commit a row with a draft: the tokens that count, up to one that ends the request. What was computed behind them is forgotten,
        and its pages are given back."""
        num_planned, request.drafted = request.drafted, 0
        num_drafted = next(arrived.drafted, num_planned)
        run = list(islice(arrived.tokens, next(arrived.runs)))
        assert 1 <= len(run) <= 1 + num_drafted
        taken: list[int] = []
        if request.is_finished:
            committed.taken.append(0)
            return []
        is_current = epoch == request.epoch
        if request.sequence in late:
            self._commit_late(request, epoch)
            if is_current:
                self.cache.shrink(request.sequence, len(request.tokens))
            committed.taken.append(0)
            return []
        request.pending -= 1
        request.num_drafted += num_drafted
        loops = request.special if isinstance(request.special, Loops) else None
        finish: Finish | None = None
        for token in run:
            request.num_accepted += len(taken) < len(run) - 1
            request.tokens.append(token)
            taken.append(token)
            finish = request.finish_after(token, loops is not None and loops.add(token))
            if finish is not None:
                break
        if request.drafter is not None:
            request.drafter.verified(len(request.tokens), num_drafted, len(run) - 1, request.draft_source)
        if self.fairness is not None:
            self.fairness.charge_drafts(request, len(taken) - 1)
        if is_current:
            request.computed = len(request.tokens) - 1  # the last one was sampled, not computed
            if request.computed - request.num_published >= self.cache.page_size:
                self._publish(request, request.computed)
            if finish is None and len(run) <= num_planned:
                self.cache.shrink(request.sequence, len(request.tokens))
                request.capacity = self.cache.capacity(request.sequence)
        if finish is not None:
            self._finish(request, committed)
        committed.taken.append(len(taken))
        delta = TokenDelta(request.id, request.index, taken, finish)
        return [delta if scores is None else scored(delta, request, scores)]

    # ── beams and choices ──

    def _plan_beams(
        self, group: BeamGroup, budget: int, draft: StepPlan, planned: Planned, is_new: bool = False
    ) -> int:
        """Advance all beams, or the prompt that they share. Returns the budget left. Pages first: a group is preempted as a whole,
        and must not be once some of it is in the plan. `is_new`: it was admitted by this plan."""
        leader, left = group.leader, budget
        if not group.is_spread and leader.computed >= leader.prompt_len:
            group.spread(self.cache)
        counts = []
        for request in group.requests if group.is_spread else [leader]:
            end = request.length if group.is_spread else request.prompt_len
            if left and end > request.computed:
                count, cost = self._share(request, end - request.computed, left, draft, is_new)
                if count:
                    counts.append((request, count))
                    left -= cost
        if not counts:
            return budget
        for request, count in counts:
            growths = self._extend(request, count, draft, planned)
            if growths is None:
                return budget
            for growth in growths:
                if growth.copied is not None:
                    draft.moves.append(PageMove("copy", growth.copied, growth.pages[0]))
        for request, pages in group.write_changes(self.cache, draft):
            draft.enters.append(self._entering(request, pages))
            if not leader.num_preemptions and request.sequence - leader.sequence < leader.params.n:
                planned.forked.append(request)
        for request, count in counts:
            self._issue(request, count, draft, planned)
            request.pending = 0  # the search chooses its token, not the sampler
        return left

    def _fork_all(self, draft: StepPlan, planned: Planned) -> None:
        """These leaders' prompts are in this plan: their other choices share all of it but the last token, which each computes for
        itself in the next step, to sample after it. A choice that writes to a shared page gets a copy. A choice that an older
        request waits before, or that finds no free row, waits in the queue as a request of its own: it will find the prompt in the prefix cache."""
        pairs = [(leader, follower) for leader in planned.forking for follower in leader.followers]
        if len(planned.forking) > 1:  # the choices of several leaders take rows in their own order
            pairs.sort(key=lambda pair: pair[1].order)
        for leader, follower in pairs:
            follower.num_cached = leader.num_cached
            follower.num_scored = follower.prompt_len - 1  # the leader delivers those of the prompt
            head = self.rows.waiting.head()
            if not self.rows.free or (head is not None and head.order < follower.order):
                self._queue(follower)
                planned.queued.append(follower)
                continue
            self.rows.seat(follower)
            pages = self.cache.fork(leader.sequence, follower.sequence, leader.prompt_len - 1)
            follower.computed = follower.capacity = leader.prompt_len - 1
            follower.num_published = follower.computed // self.cache.page_size * self.cache.page_size
            draft.enters.append(self._entering(follower, pages))
            planned.forked.append(follower)
        for leader in planned.forking:
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

    # ── a step's result ──

    def _commit_special(
        self,
        request: Request,
        epoch: int,
        end: int,
        samples: bool,
        arrived: _Columns,
        scores: dict[int, tuple[Logprobs, ...]] | None,
        late: set[int],
        committed: Committed,
    ) -> list[TokenDelta]:
        """Commit one row of a request that is not a plain one. `end`: how far the step computed it."""
        special = request.special
        token = next(arrived.tokens) if samples and not isinstance(special, PoolingParams) else -1
        vector = next(arrived.vectors) if samples and isinstance(special, PoolingParams) else b""
        candidates = next(arrived.candidates) if samples and isinstance(special, BeamGroup) else None
        if request.is_finished:
            return []
        is_current = epoch == request.epoch
        if isinstance(special, BeamGroup):
            # What a group computed before it was preempted is computed again.
            if candidates is None or not is_current or not special.take(request, candidates):
                return []
            return [] if special.advance(self.cache) else self._end_beams(special, committed)
        if request.sequence in late:
            self._commit_late(request, epoch)
            return []
        if is_current and end - request.num_published >= self.cache.page_size:
            self._publish(request, end)
        if not samples:
            return []
        request.pending -= 1
        request.tokens.append(token)
        if isinstance(special, PoolingParams):
            finish = Finish("stop", None, request.num_cached, request.num_preemptions)
            self._finish(request, committed)
            return [TokenDelta(request.id, request.index, [], finish, vector)]
        assert special is not None
        delta = self._last(request, token, request.finish_after(token, special.add(token)), committed)
        return [delta if scores is None else scored(delta, request, scores)]

    def _commit_late(self, request: Request, epoch: int) -> None:
        """The step sampled nothing for this request. Its last known token is computed again: the page may be shared by now, or out of
        a window, so the next plan asks the cache."""
        last = len(request.tokens) - 1
        if self.fairness is not None and epoch == request.epoch:
            self.fairness.lose(request, last + request.pending)
        request.pending -= 1
        if epoch == request.epoch:
            request.computed, request.capacity = last, 0
            if request.pending:  # the step in flight is late as well: both count as one
                request.late_steps = max(request.late_steps, 1)
                return
            request.late_steps = request.late_steps + 1 if request.late_at == last else 1
            request.late_at = last
            request.sits_out = min((1 << min(request.late_steps, 16)) >> 2, MAX_SIT_OUT)
        elif request.is_swapped and request.computed > last:
            request.computed = last
            if not self.cache.sees(request.sequence, last):
                self.cache.release(request.sequence)
                request.is_swapped, request.computed = False, 0

    def _last(self, request: Request, token: int, finish: Finish | None, committed: Committed) -> TokenDelta:
        """The delta of a token that may be the last."""
        if finish is not None:
            self._finish(request, committed)
        return TokenDelta(request.id, request.index, [token], finish)

    def _end_beams(self, group: BeamGroup, committed: Committed) -> list[TokenDelta]:
        for request in group.requests:
            self._finish(request, committed)
        return group.deltas(group.leader.params.n)

    def _fail(self, sampling: list[Request], committed: Committed) -> None:
        """End the requests whose token of this step does not count: they alone cannot go on."""
        for at, message in committed.result.failures.items():
            if not (request := sampling[at]).is_finished:
                self._finish(request, committed)
                finish = Finish("error", None, request.num_cached, request.num_preemptions, message, "grammar")
                committed.deltas.append(TokenDelta(request.id, request.index, [], finish))

    def _limit(self, sampling: list[Request], committed: Committed) -> None:
        """Requests that their grammar ended because of max_tokens. They finish with "length", as if max_tokens were what they have
        now."""
        result = committed.result
        for at in result.last:
            if (request := sampling[at]).is_finished:
                continue
            request.max_len = min(request.max_len, len(request.tokens) + 1)
            if result.tokens[at] in request.stop_ids:  # the grammar allowed nothing else
                self._finish(request, committed)
                finish = Finish("length", None, request.num_cached, request.num_preemptions)
                committed.deltas.append(TokenDelta(request.id, request.index, [], finish))

    # ── preemption ──

    def _extend(self, request: Request, count: int, draft: StepPlan, planned: Planned) -> list[Growth] | None:
        """Get pages for `count` more tokens, preempting the youngest as needed. None: the request itself was preempted."""
        start, end = request.computed, request.computed + count
        while (growths := self.cache.extend(request.sequence, start, end)) is None:
            victim = self.rows.running[-1]
            self._preempt(victim, draft, planned)
            if request.row < 0:  # it was itself the youngest, or a beam of the youngest search
                break
        return growths

    def _preempt(self, request: Request, draft: StepPlan, planned: Planned) -> None:
        """Back to the queue, before all newer ones; its keys and values go to host pages or are computed again."""
        self.num_preemptions += 1
        if isinstance(request.special, BeamGroup):
            self._preempt_beams(request.special, planned)
            return
        request.num_preemptions += 1
        request.computed -= request.drafted  # which of a draft in flight counts is not known
        if self.fairness is not None:
            self.fairness.lose(request, request.computed)
        num_computed, transfer = request.computed, None
        self.rows.requeue(request)
        is_worth_it = num_computed >= max(1, self.swap_min_tokens)
        if is_worth_it and self.cache.sees(request.sequence, num_computed):
            transfer = self.cache.swap_out(request.sequence, num_computed)
        if transfer is None:
            self.cache.release(request.sequence)
            request.computed = 0
        else:
            request.is_swapped = True
            for device, host in zip(transfer.device, transfer.host, strict=True):
                draft.moves.append(PageMove("out", device, host))
        request.num_published = 0
        planned.returned.append(Returned(request, num_computed, request.is_swapped))

    def _preempt_beams(self, group: BeamGroup, planned: Planned) -> None:
        """Always computed again: copies on the host would not share pages as the beams do. The leader queues for all of them."""
        planned.returned.append(Returned(group.leader, group.leader.computed, False))
        for request in group.requests:
            self.rows.leave(request)
            if request.sequence in self.cache.tables:
                self.cache.release(request.sequence)
            request.computed = request.num_published = 0
        group.gather()
        group.leader.num_preemptions += 1
        self.rows.queue(group.leader)

    def _hand_over(self, leader: Request, removed: Removed) -> None:
        """A leader is aborted alone, before its prompt is computed: each of its followers goes on as a request of its own."""
        for follower in leader.followers:
            if not leader.is_untouched:
                removed.returned.append(Returned(follower, 0, False))
            self._queue(follower)
        leader.followers = []

    # ── entering the queue, and ending ──

    def _awaits_grammar(self, request: Request) -> bool:
        return bool(request.params.grammar) and not self.grammar_cache.is_ready(request.id)

    def _queue(self, request: Request) -> None:
        if self._awaits_grammar(request):
            self.rows.hold_back(request)
        else:
            self.rows.queue(request)

    def _promote(self, request: Request) -> None:
        """All older sequences of its response have ended: it becomes primary, at a place behind all primaries there are."""
        for sequence in request.special.requests if isinstance(request.special, BeamGroup) else (request,):
            self.rows.promote(sequence, self._next_sequence)
        self._next_sequence += 1

    def _let_in(self, requests: Iterable[Request]) -> list[Request]:
        """Let those into the queue that waited for their grammar and need not any more."""
        awaiting = self.rows.awaiting_grammar
        let_in = [
            request for request in requests if request.sequence in awaiting and self.grammar_cache.is_ready(request.id)
        ]
        for request in let_in:
            self.rows.let_in(request)
        return let_in

    def _finish(self, request: Request, happened: Removed | Committed) -> None:
        """Free row and pages at once: a step in flight that still writes to them runs before any that reuses them."""
        request.is_finished = True
        self._watched.discard(request.sequence)
        if self.fairness is not None:
            self.fairness.leave(request)
        if self.speculation is not None and request.drafter is not None:
            self.speculation.finished(request)
        happened.ended.append(request)
        choices = self._open[request.id]
        for other in choices:
            if request in other.followers:
                other.followers.remove(request)
        if (primary := self.siblings.leave(request)) is not None:
            self._promote(primary)
        self.rows.remove(request)
        if request.is_swapped or request.sequence in self.cache.tables:
            self.cache.release(request.sequence)
        choices.remove(request)
        if choices:
            return
        del self._open[request.id]
        if request.params.grammar:
            dropped = self.grammar_cache.drop(request.id)
            happened.jobs += dropped.jobs
            for ready_id in dropped.ready:
                happened.let_in += self._let_in(self._open[ready_id])
