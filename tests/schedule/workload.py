"""One random workload through scheduler, cache and oracle device, with every invariant checked at every step."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import msgspec

from octavo.cache import KVCache, audit
from octavo.cache.pool import PageChanges
from octavo.cache.span import most_held, pages_of, pages_of_beams
from octavo.messages import GenerateRequest, PoolingParams, SamplingParams
from octavo.messages.params import choice_seed
from octavo.messages.speculation import SpeculationSettings
from octavo.schedule import POLICIES, Fairness, Scheduler
from octavo.schedule.drafts.grammar import GrammarDrafter
from octavo.schedule.drafts.lengths import CostSpeculation
from octavo.schedule.drafts.outputs import CONTEXT, LEAST_OUTPUT, SEPARATOR
from octavo.schedule.grammar_cache import MAX_JOBS, GrammarCache, GrammarJob
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, Planned
from octavo.schedule.stall_limit import MIN_PROMPT_TOKENS, MIN_SHARE, UNKNOWN_PART, StallLimit
from octavo.schedule.step_costs import StepCosts, StepShape
from tests.schedule.drafts import DiceSpeculation
from tests.schedule.oracle import OracleDevice, Sequence, beam_reference, reference, vector_of

by_sequence = attrgetter("sequence")


def search_of(request: Request) -> list[Request]:
    """All beams of its search, the leader first; empty: it is none. By shape: a planted fault has a BeamGroup of its own."""
    return getattr(request.special, "requests", [])


@dataclass
class Tally:
    preemptions: int = 0
    swaps: int = 0
    copies: int = 0
    forks: int = 0
    hits: int = 0
    aborts: int = 0
    vectors: int = 0
    passed: int = 0  # pages that a window has passed
    beams: int = 0  # answers of beam searches
    forced: int = 0  # rows of beams that went on with a token that was chosen
    beams_again: int = 0  # searches that were thrown out and went on
    overtaken: int = 0  # admissions that a priority put before an older request
    short_hits: int = 0  # prefixes found of which a window had let the beginning go
    deaths: int = 0
    survivors: int = 0  # choices that went on, with tokens, in a new engine
    awaiting: int = 0  # requests whose grammar had to be compiled first
    forgotten: int = 0  # grammars that were ready once, and made room for others
    delayed: int = 0  # steps at which a grammar had no job yet, because others were being compiled
    passed_by: int = 0  # times that a younger one entered while an older one's grammar was not ready
    late: int = 0  # masks that were late
    void: int = 0  # of those: because the token before was
    rested: int = 0  # plans that a late row sat out
    restarts: int = 0  # late rows that were preempted, or whose pages a window had passed
    made_way: int = 0  # steps in which a primary entered in the place of younger sequences
    promoted: int = 0  # sequences that became the primary of their response
    kept_out: int = 0  # steps in which a primary had no row, rightly, while there were pages for it
    apart: int = 0  # choices that found no row with their leader, and went on as requests of their own
    capped: int = 0  # plans in which a prompt got less than the step had room for, because of streams
    held: int = 0  # … in which the queue's head was not admitted for that
    least: int = 0  # … in which a prompt got more than there was time for, because it has to go on
    whole: int = 0  # … because it must be computed in one step
    unknown: int = 0  # plans in which a prompt was cut before costs were known
    free: int = 0  # plans with prompts and a limit, and without streams
    drafts: int = 0  # tokens that were drafted
    accepted: int = 0  # … and counted
    rejected: int = 0
    cut: int = 0  # runs in which a token ended the request before the run was over
    unproposed: int = 0  # drafts for which the draft model had no token
    lost: int = 0  # drafts in flight when their request was preempted
    given_back: int = 0  # pages of drafts that were not accepted
    sat_out: int = 0  # plans that a row with a draft in flight sat out
    in_flight: int = 0  # the most plans in flight that sample, with several stages
    left_out: int = 0  # plans in which a row was left out, so that the next plan has one
    turns: int = 0  # plans with rows that compute one token
    kept: int = 0  # outputs that later requests of the same key could draft from
    followed: int = 0  # times that a request was seen to follow one of these


@dataclass
class Workload:
    """Everything that is random about a case, drawn from one seed."""

    seed: int
    scheduler_type: type[Scheduler] = Scheduler
    cache_type: type[KVCache] = KVCache
    speculation_type: type[CostSpeculation] = CostSpeculation
    has_windows: bool = False
    is_mortal: bool = False  # the engine ends now and then: all that is left of it is what its clients have seen
    has_beams: bool = False
    has_grammars: bool = False
    has_late: bool = False  # has grammars, and masks may be late
    has_limit: bool = False  # steps beside streams have a limit, and costs are learned now and then
    num_stages: int = 1  # that plans go through
    has_responses: bool = False  # several prompts are parts of one response, and have more choices than there are rows
    has_drafts: bool = False  # rows verify tokens that are right, wrong, or right for a while
    has_recent: bool = False  # … that stood in the request's own text, or in recent outputs of its key
    policy: str = "fcfs"
    has_tenants: bool = False  # requests are of several, which are served by their weights
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        self.has_grammars |= self.has_late
        self.has_drafts |= self.has_recent
        self.page_size = r.choice([1, 2, 3, 4])
        self.depth = r.choice([0, 1])
        if self.num_stages > 1:
            self.depth = self.num_stages
        self.budget = r.choice([1, 2, 3, 8, 32])
        self.rows = r.choice([1, 2, 3, 5, 9])
        longest = r.choice([6, 12, 20])
        self.stall_limit: StallLimit | None = None
        if self.has_limit:  # longer prompts, or none is ever cut
            dice = random.Random(self.seed + 8 * 10**9)
            longest, self.budget = dice.choice([20, 80]), dice.choice([4, 64, 128])
            self.stall_limit = StallLimit.of(dice.choice(["auto", 1.0, 60.0, 120.0]))
        self.windows = (0,)
        if self.has_windows:
            narrow = r.choice([1, 2, 3, 5, 8])
            self.windows = r.choice([(narrow,), (0, narrow), (0, 0, narrow), (narrow, 0, narrow), (narrow, 2 * narrow)])
        # What the longest request needs: with less, it could never end.
        least = self.least_pages = pages_of(2 * longest, self.page_size, self.windows, self.budget)
        self.num_pages = least + r.choice([0, 1, 3, 20]) * len(self.windows)
        if self.has_limit:  # and several of them at the same time
            self.num_pages, self.rows = self.num_pages * dice.choice([1, 3, 6]), dice.choice([2, 5, 9])
        self.num_host_pages = r.choice([0, 0, 3, 30])
        self.shares, self.swap_min_tokens = r.random() < 0.8, r.choice([0, 4])
        if self.has_drafts and self.seed % 3 < 2:  # drafts in flight when pages run out
            self.depth, self.rows, self.num_pages = 1, max(self.rows, 3), least
            self.num_host_pages, self.swap_min_tokens = 30, 0
        self._start_engine()
        stems = [[r.randrange(3) for _ in range(longest)] for _ in range(2)]
        self.arrivals: list[tuple[int, GenerateRequest]] = []
        for i in range(r.randrange(1, 12)):
            kept = r.randrange(0, longest - 1)
            prompt = r.choice(stems)[:kept] + [r.randrange(3) for _ in range(r.randrange(1, longest - kept))]
            max_tokens = r.randrange(1, longest)
            params = SamplingParams(
                n=r.randrange(1, min(4, self.rows) + 1) if r.random() < 0.4 else 1,
                seed=r.randrange(5),
                max_tokens=max_tokens,
                min_tokens=r.choice([0, r.randrange(max_tokens + 1)]),
            )
            stop_ids = r.choice([[], [5], [5, 6]])
            self.arrivals.append((r.randrange(0, 25), GenerateRequest(f"r{i}", prompt, params, stop_ids)))
        self.arrivals.sort(key=lambda pair: pair[0])
        self._want_vectors(random.Random(self.seed + 10**9))
        if self.has_responses:
            self._join_responses(random.Random(self.seed + 6 * 10**9))
        if self.has_tenants:
            self._assign_tenants(random.Random(self.seed + 12 * 10**9))
        if self.has_beams:
            self._search_beams(random.Random(self.seed + 3 * 10**9))
        if self.has_grammars:
            self._keep_to_grammars(random.Random(self.seed + 4 * 10**9))
        if self.has_drafts:
            self._assign_owners(random.Random(self.seed + 14 * 10**9))

    def _start_engine(self) -> None:
        self.cache = self.cache_type(
            self.num_pages, self.page_size, self.num_host_pages, self.shares, None, self.windows, self.budget,
            eviction="adaptive" if self.seed % 2 else "lru",
        )  # fmt: skip
        policy = POLICIES[self.policy]
        speculation = None
        if self.has_drafts:
            speculation = DiceSpeculation(random.Random(self.seed + 10**10), self.windows, self.seed % 2 > 0)
        if self.has_recent:
            most = random.Random(self.seed).choice([1, 2, 3, 8])
            settings = SpeculationSettings("suffix", is_adaptive=False, asks_grammars=True, max_cached_requests=most)
            speculation = self.speculation_type(settings)
        self.scheduler = self.scheduler_type(
            self.cache,
            self.rows,
            self.budget,
            self.swap_min_tokens,
            policy,
            self.stall_limit,
            self.num_stages,
            speculation,
            Fairness(self.rows, self.budget) if self.has_tenants else None,
        )
        self.ended: dict[tuple[bytes, str], list[list[int]]] = {}  # key → outputs of its requests that have ended
        self.all_rows = [*range(self.rows)]
        self.most_pages = [0] * len(self.windows)  # of a table, by group; 0: there is no window
        for group, window in enumerate(self.windows):
            if window:
                self.most_pages[group] = most_held(window, self.budget, self.page_size)
                assert self.most_pages[group] <= -(-(window + self.budget) // self.page_size) + 1
        self.num_left_out: dict[int, int] = {}  # sequence → plans since it could have been in one
        self.pages_reported: set[bytes] = set()  # of the prefix cache, by what plan() and commit() have returned
        if self.seed % 4 < 3:
            self.cache.watch_pages()
        lateness = random.Random(self.seed + 6 * 10**9) if self.has_late else None
        self.device = OracleDevice(
            self.page_size, self.rows, self.windows, lateness, self.num_stages, random.Random(self.seed + 13 * 10**9)
        )
        self.ready: set[str] = set()  # grammars, where steps are computed
        self.compiling: deque[str] = deque()  # one after the other
        self._sizes = random.Random(0)
        if self.has_grammars:
            dice = random.Random(self.seed + 5 * 10**9)
            self.scheduler.grammar_cache = GrammarCache(dice.choice([1, 2, 4]), dice.choice([0, 1, 3]))

    def _keep_to_grammars(self, r: random.Random) -> None:
        for at, (step, source) in enumerate(self.arrivals):
            if source.pooling is None and not source.params.use_beam_search and r.random() < 0.6:
                params = msgspec.structs.replace(source.params, grammar=r.choice("abcdef"), min_tokens=0)
                self.arrivals[at] = (step, msgspec.structs.replace(source, params=params))
        self._start_engine()

    def _start(self, jobs: list[GrammarJob]) -> None:
        """What is to be compiled is begun at once."""
        grammar_cache = self.scheduler.grammar_cache
        for job in jobs:
            assert job.grammar not in self.ready and job.grammar not in self.compiling, "made ready twice"
            users = {request.params.grammar for request in self.scheduler.running}
            assert users.isdisjoint(job.forgets), "who runs may have to come back"
            self.ready -= set(job.forgets)
            self.tally.forgotten += len(job.forgets)
            if not job.grammar:
                assert job.forgets, "a job for nothing"
                continue
            assert any(request.params.grammar == job.grammar for request in self.scheduler.requests()), (
                "no request wants it"
            )
            self.compiling.append(job.grammar)
        assert len(self.compiling) <= MAX_JOBS, "more than may be out"
        missing = grammar_cache._users.keys() - self.ready - set(self.compiling)
        is_full = grammar_cache._used_bytes >= grammar_cache._max_bytes
        assert not missing or is_full or len(self.compiling) == MAX_JOBS, (
            "it is wanted, there is room, and no job compiles it"
        )
        self.tally.delayed += bool(missing)

    def _compile(self, fate: random.Random) -> None:
        """It takes some steps."""
        if self.compiling and fate.random() < 0.4:
            self.ready.add(self.compiling[0])
            self._start(self.scheduler.prepared({self.compiling.popleft(): self._sizes.randrange(2**30)}).jobs)
            self._compile(fate)

    def _check_entries(self, planned: Planned) -> None:
        scheduler, plan = self.scheduler, planned.plan
        assert all(not enter.params.grammar or enter.params.grammar in self.ready for enter in plan.enters), "too early"
        admitted = [request.order for request in planned.admitted]
        waiting = [request.order for request in scheduler.waiting if request not in planned.queued]
        assert not admitted or not waiting or max(admitted) < min(waiting), "overtaking"
        awaiting_grammar = scheduler.awaiting_grammar.values()
        assert all(
            request.params.grammar not in self.ready or scheduler.grammar_cache._later for request in awaiting_grammar
        ), "kept out"
        self.tally.passed_by += bool(admitted) and any(request.order < max(admitted) for request in awaiting_grammar)
        returned = [each.request for each in planned.returned]
        assert not any(request in returned for request in planned.admitted), "entered in the step of its preemption"
        forked = [request.order for request in planned.forked if not search_of(request)]
        older = min((request.order for request in scheduler.waiting), default=None)
        assert not forked or older is None or max(forked) < older, "a choice before an older request"
        self.tally.made_way += bool(admitted) and bool(returned)
        self.tally.apart += len(planned.queued)
        self._check_ways(planned)

    def _check_ways(self, planned: Planned) -> None:
        """No primary waits for what sequences hold that must give way to it; and the youngest of them is preempted first."""
        scheduler, head = self.scheduler, planned.head
        for each in planned.returned:
            if each.request.late_steps:  # perhaps because a window has passed its pages, which none can give back
                continue
            younger = [request for request in planned.requests if request.order > each.request.order]
            younger = [request for request in younger if request.tenant is each.request.tenant]
            assert not any(request.gives_way for request in younger), "a younger one stays"
        if head is None or not head.is_primary or planned.returned or planned.head_waits_for != "rows":
            return
        younger = [request for request in scheduler.running if request.gives_way and request.order > head.order]
        younger = [request for request in younger if request.tenant is head.tenant]
        width = len(search_of(head)) or 1
        # Pages may have become free since it was decided; so only where they cannot have been scarce.
        own = self.cache.num_missing(head.sequence, head.tokens, reuse=False) + self.cache.pool.num_free
        grown = (2 * self.rows + self.budget) * len(self.windows)
        if self.cache.pool.num_free >= own + grown:
            assert len(scheduler.rows.free) + len(younger) < width, "kept from a row"
            self.tally.kept_out += 1

    def _learn(self, dice: random.Random) -> None:
        if self.has_limit and dice.random() < 0.2:
            costs = (dice.choice([0.0, 0.004]), dice.choice([0.0, 0.001, 0.01]), dice.choice([0.0, 0.0005, 0.002]))
            longer = dice.choice([0.0, 0.0001]), dice.choice([0.0, 0.00002, 0.0001])
            self.scheduler.learn(StepCosts(*costs, *longer, spread=dice.choice([1.0, 1.0, 1.3])))

    def _before(self) -> tuple[list[Request], list[Request]]:
        """Of those that run, in their order: who computes one token next, and who several."""
        left = [(request, request.length - request.computed) for request in self.scheduler.running]
        one = [request for request, count in left if count == 1 and request.length < request.max_len]
        return one, [request for request, count in left if count > 1 and not search_of(request) and request.capacity]

    def _entered_before_limit(
        self, planned: Planned, columns: list[tuple[Request, int, int]]
    ) -> list[tuple[Request, int]]:
        """(request, start) of those that came back from host pages with one token to compute, before the limit was found: that is when
        the first prompt is planned, or the first request asks to enter that may have one."""
        entered = []
        for request, start, count in columns:
            comes_back = request in planned.admitted and request.sequence in self._swapped
            if count > 1 or (request in planned.admitted and not comes_back):
                break
            if comes_back:
                entered.append((request, start))
        return entered

    def _check_limit(self, planned: Planned, one: list[Request], several: list[Request], had_output: set[int]) -> None:
        """Beside streams, a step computes as much of prompts as there is time for, the oldest first, and never nothing of the oldest."""
        costs, plan = self.scheduler.costs, planned.plan
        if self.stall_limit is None:
            assert planned.capped is None
            return
        drafted = {draft.at: len(draft.tokens) for draft in plan.drafts}
        counts = [count - drafted.get(at, 0) for at, count in enumerate(plan.counts)]
        columns = list(zip(planned.requests, plan.starts, counts, strict=True))
        if planned.returned:
            return  # the limit was found with rows that then left
        if self.num_stages > 1:  # rows that are in other plans
            one = [request for request in one if request in planned.requests or not request.pending]
        entered = self._entered_before_limit(planned, columns)
        one = [*one, *(request for request, _ in entered)]
        had_output = had_output | {request.sequence for request, start in entered if start >= request.prompt_len}
        streams = [request for request in one if request.sequence in had_output and not search_of(request)]
        chunks = [(request, start, count) for request, start, count in columns if count > 1]
        if not streams:
            assert planned.capped is None, "no stream, and yet a limit"
            self.tally.free += bool(chunks)
            return
        if costs is None:
            most = max((self.budget - len(one)) // UNKNOWN_PART, MIN_PROMPT_TOKENS)
            is_whole = any(request.needs_one_step for request, _, _ in chunks)
            assert is_whole or sum(count for _, _, count in chunks) <= most, "more than a part of the budget"
            self.tally.unknown += planned.capped is not None
            return
        computed = self._computed | {request.sequence: start for request, start in entered}
        context = sum(computed[request.sequence] for request in one)
        seconds = costs.seconds(StepShape(len(one), 0, context, 0))
        num_turns = 1 if self.num_stages == 1 else self.num_stages + 1  # plans from one token of a row to the next
        limit = self.stall_limit.within(costs, seconds * num_turns) / num_turns
        left = max(limit / costs.spread - seconds, MIN_SHARE * seconds)
        for at, (request, start, count) in enumerate(chunks):
            took = costs.chunk_seconds(start, count)
            if took > left * (1 + 1e-9) + 1e-12:
                must = at == 0 or request in planned.admitted
                assert must and (count <= MIN_PROMPT_TOKENS or request.needs_one_step), "longer than it may take"
                self.tally.whole += request.needs_one_step
                self.tally.least += not request.needs_one_step
            left -= took
        is_whole = [start + count >= request.length - 1 or bool(search_of(request)) for request, start, count in chunks]
        assert all(is_whole[:-1]), "a prompt goes on after an older one was cut"
        new = [request for request, _, count in columns if count > 1 and request in planned.admitted]
        prompts = sorted([*several, *new], key=lambda request: request.order)
        in_plan = [request in planned.requests for request in prompts if not search_of(request)]
        assert in_plan == sorted(in_plan, reverse=True), "a younger prompt goes on before an older one"
        is_full = sum(plan.counts) == self.budget or any(search_of(request) for request, _, _ in chunks)
        assert not in_plan or in_plan[0] or is_full, "the oldest prompt starves"
        whole = any(request.needs_one_step for request in planned.admitted)
        # With several stages a row may be left for the next plan: _check_turn() has how long it may wait.
        if self.budget >= len(one) + MIN_PROMPT_TOKENS and not whole and self.num_stages == 1:
            missing = [request for request in streams if request not in planned.requests and not request.late_steps]
            assert not missing, "prompts took a stream's place"
        self.tally.capped += planned.capped is not None
        self.tally.held += planned.head_waits_for == "streams"

    def _check_late(self, planned: Planned) -> None:
        """A row whose mask was late samples the same position again, alone of all rows sits out, and only beside others."""
        for request in self.scheduler.running:
            if request.late_steps and not request.capacity:
                assert request.computed == len(request.tokens) - 1, "its last token is to be computed again"
                beside = planned.plan.rows or planned.returned or self.scheduler._in_flight
                assert beside, "sits out for nothing"
                self.tally.rested += not request.pending
        self.tally.restarts += sum(request.late_at == len(request.tokens) - 1 for request, *_ in planned.returned)

    def _check_turn(self, planned: Planned, flight: deque) -> None:
        """With several stages, a row is in one plan that samples for it, and none waits longer for its next turn than the plans in flight
        take."""
        if self.num_stages == 1:
            return
        sampling = [
            {row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples} for plan, _ in flight
        ]
        self.tally.in_flight = max(self.tally.in_flight, sum(map(bool, sampling)))
        plan = planned.plan
        decodes = [row for row, count in zip(plan.rows, plan.counts, strict=True) if count == 1]
        ready = {
            request.sequence
            for request in self.scheduler.running
            if request.row not in plan.rows
            and not (request.pending or request.late_steps or search_of(request))
            and request.length - request.computed == 1
        }
        self.num_left_out = {sequence: self.num_left_out.get(sequence, 0) + 1 for sequence in ready}
        if sum(plan.counts) == self.budget or planned.returned:  # there was no room
            self.num_left_out = {}
        # One more for a choice that was forked by the first of these plans. Rows of a tenant that was served less go first.
        most = self.num_stages + 1 + (self.rows if self.has_tenants else 0)
        assert all(count <= most for count in self.num_left_out.values()), "left out for too long"
        self.tally.left_out += bool(self.num_left_out)
        self.tally.turns += bool(decodes)

    def _want_vectors(self, r: random.Random) -> None:
        """Of some requests a vector is wanted: whole where a step has room for it, or in chunks. By dice of its own, so that
        cases without them stay what they were."""
        for at, (step, request) in enumerate(self.arrivals):
            if r.random() < 0.2:
                params = SamplingParams(seed=0, max_tokens=1)
                needs_one_step = len(request.prompt_ids) <= self.budget and r.random() < 0.7
                pooled = GenerateRequest(
                    request.id,
                    request.prompt_ids,
                    params,
                    [],
                    pooling=PoolingParams("last"),
                    needs_one_step=needs_one_step,
                )
                self.arrivals[at] = (step, pooled)

    def _join_responses(self, r: random.Random) -> None:
        """Parts of a response come one after the other; others may come between them."""
        for at, (step, source) in enumerate(self.arrivals):
            params = source.params
            if source.pooling is None and r.random() < 0.4:
                params = msgspec.structs.replace(params, n=r.randrange(1, 7))
            response_id = r.choice(["", "", "a", "a", "b", "c"])
            changed = msgspec.structs.replace(source, params=params, response_id=response_id)
            self.arrivals[at] = (step, changed)

    def _assign_tenants(self, r: random.Random) -> None:
        weights = [r.choice([0.5, 1.0, 2.0, 4.0]) for _ in range(r.choice([2, 3, 5]))]
        for at, (step, source) in enumerate(self.arrivals):
            tenant = r.randrange(len(weights))
            self.arrivals[at] = (step, msgspec.structs.replace(source, tenant=tenant, weight=weights[tenant]))

    def _assign_owners(self, r: random.Random) -> None:
        for at, (step, source) in enumerate(self.arrivals):
            params = source.params
            if self.has_recent:
                params = msgspec.structs.replace(
                    params, prefix_salt=r.choice(["", "", "salt"]), use_speculation=r.random() < 0.8
                )
            changed = msgspec.structs.replace(source, params=params, owner=r.choice([b"", b"a", b"b"]))
            self.arrivals[at] = (step, changed)

    def _search_beams(self, r: random.Random) -> None:
        """Some requests become beam searches, with pages for the largest of them as the door sees to it; some workloads are
        scheduled by priority."""
        self.policy = "fcfs" if self.has_tenants else r.choice([*POLICIES])
        needed = self.least_pages
        for at, (step, source) in enumerate(self.arrivals):
            params, stop_ids = source.params, source.stop_ids
            if source.pooling is None and r.random() < 0.5:
                width = r.randrange(1, min(4, self.rows) + 1)
                params = SamplingParams(
                    n=r.randrange(1, width + 1),
                    best_of=width,
                    use_beam_search=True,
                    length_penalty=r.choice([0.0, 1.0, 2.0, -1.0]),
                    early_stopping=r.choice([False, True, "never"]),
                    seed=0,
                    max_tokens=params.max_tokens,
                    min_tokens=params.min_tokens,
                )
                lens = (len(source.prompt_ids), len(source.prompt_ids) + params.max_tokens)
                pages = pages_of_beams(*lens, width, self.page_size, self.windows, self.budget)
                if pages > 2 * self.least_pages:
                    continue
                needed = max(needed, pages)
            priority = r.randrange(-1, 2) if self.policy == "priority" else 0
            pooling = {"pooling": source.pooling, "needs_one_step": source.needs_one_step, "priority": priority}
            pooling |= {"response_id": source.response_id, "tenant": source.tenant, "weight": source.weight}
            self.arrivals[at] = (step, GenerateRequest(source.id, source.prompt_ids, params, stop_ids, **pooling))
        self.num_pages = needed + r.choice([0, 0, 1, 5])
        self._start_engine()

    def run(self) -> Tally:
        r, scheduler = self.random, self.scheduler
        fate = random.Random(
            self.seed + 2 * 10**9
        )  # by dice of its own, so that cases without deaths stay what they were
        dice = random.Random(self.seed + 9 * 10**9)
        haste = random.Random(self.seed + 11 * 10**9)
        sources = {request.id: request for _, request in self.arrivals}
        got: dict[tuple[str, int], list[int]] = {
            (request.id, index): [] for request in sources.values() for index in range(request.params.n)
        }
        vectors: dict[tuple[str, int], bytes] = {}
        finished: dict[tuple[str, int], str] = {}
        aborted: set[tuple[str, int]] = set()
        flight: deque = deque()
        step = 0
        while self.arrivals or not scheduler.is_idle or flight:
            while self.arrivals and self.arrivals[0][0] <= step:
                self._start(scheduler.add(self.arrivals.pop(0)[1]).jobs)
                self.tally.awaiting += len(scheduler.awaiting_grammar)
            if r.random() < 0.03 and not scheduler.is_idle:
                victim = r.choice(sorted(scheduler.request_ids()))
                choices = range(sources[victim].params.n)
                index = r.choice([-1, *choices])
                if (removed := scheduler.abort(victim, index)) is not None:
                    self._start(removed.jobs)
                    self._note_ended(removed.ended)
                    aborted |= {(victim, i) for i in choices if index in (-1, i)} - finished.keys()
                    self.tally.aborts += 1
                    self.num_left_out = {}  # fewer rows share the next plans
            if r.random() < 0.01:
                self.cache.reset_prefixes()
            self._compile(fate)
            self._learn(dice)
            one, several = self._before()
            had_output = {request.sequence for request in one if request.length > request.prompt_len}
            self._computed = {request.sequence: request.computed for request in one}
            self._swapped = {request.sequence for request in scheduler.rows.waiting if request.is_swapped}
            preemptions = scheduler.num_preemptions
            planned = scheduler.plan()
            self._check_limit(planned, one, several, had_output)
            plan = planned.plan
            self._hear(planned.pages)
            self._check_entries(planned)
            self._check_late(planned)
            assert sum(plan.counts) <= self.budget, "over budget"
            self._count(plan)
            # A choice that must copy a page and is alone with too few of them leaves, to enter as a request of its own.
            has_left = scheduler.num_preemptions > preemptions
            assert not plan.is_empty or flight or not scheduler.has_work or has_left, "work is there, nothing advances"
            if not plan.is_empty:
                flight.append((plan, self.device.run(plan)))  # stream order: executed in the order of issue
            self._check_turn(planned, flight)
            drains = self.has_drafts and haste.random() < 0.4
            num_due = max(len(flight) - self.depth, int(plan.is_empty and bool(flight)))
            for _ in range(len(flight) if drains else num_due):
                num_used = self.cache.pool.num_used
                committed = scheduler.commit(*flight.popleft())
                self._count_runs(committed, num_used)
                self._hear(committed.pages)
                self._start(committed.jobs)
                self._note_ended(committed.ended)
                for delta in committed.deltas:
                    key = (delta.request_id, delta.index)
                    assert key not in aborted, "a delta after the abort"
                    assert key not in finished, "a delta after the end"
                    got[key] += delta.token_ids
                    if delta.vector:
                        vectors[key] = delta.vector
                    if sources[delta.request_id].params.use_beam_search:
                        self.tally.beams += 1
                        self.tally.beams_again += delta.finish.num_preemptions > 0
                    if delta.finish is not None:
                        finished[key] = delta.finish.reason
            self.check_invariants()
            for request in scheduler.requests():
                if self.has_recent and request.drafter is not None:
                    self._check_followed(request)
            if self.is_mortal and fate.random() < 0.1:
                flight.clear()
                arrived = [
                    source for source in sources.values() if all(source is not other for _, other in self.arrivals)
                ]
                self._die(arrived, got, finished.keys() | aborted)
                scheduler = self.scheduler
            step += 1
            assert step < 5000, "livelock"
        for (request_id, index), tokens in got.items():
            source = sources[request_id]
            if source.pooling is not None:
                self._check_vector(source, vectors.get((request_id, index)), (request_id, index) in aborted)
                continue
            if source.params.use_beam_search:
                self._check_beam(source, index, tokens, finished.get((request_id, index)))
                continue
            seed = choice_seed(source.params.seed, index)
            params = source.params
            want = reference(
                source.prompt_ids, seed, params.max_tokens, source.stop_ids, params.min_tokens, self.windows
            )
            if (request_id, index) in aborted:
                assert tokens == want[: len(tokens)], f"aborted output of {request_id}/{index}"
            else:
                assert tokens == want, f"output of {request_id}/{index}: {tokens} != {want}"
                stopped = want[-1] in source.stop_ids and len(want) >= source.params.min_tokens
                assert finished[request_id, index] == ("stop" if stopped else "length")
        if self.has_recent:
            self._check_kept()
        self._check_all_returned()
        self.tally.late += self.device.num_late
        self.tally.void += self.device.num_void
        self.tally.preemptions += scheduler.num_preemptions
        self.tally.hits = self.cache.hit_tokens
        return self.tally

    def _note_ended(self, ended: list[Request]) -> None:
        if not self.has_recent:
            return
        for request in ended:
            tokens, params = request.tokens, request.params
            may_draft = params.use_speculation and not params.use_beam_search and request.pooling is None
            if may_draft and len(tokens) - request.prompt_len >= LEAST_OUTPUT:
                key = (request.owner, params.prefix_space)
                self.ended.setdefault(key, []).append(tokens[max(0, request.prompt_len - CONTEXT) :])

    def _check_kept(self) -> None:
        """What is kept for a key are the last outputs of its own requests that may draft: all that there may be, or half of them."""
        outputs = self.scheduler.speculation._recent
        most = self.scheduler.speculation.settings.max_cached_requests
        num_tokens = 0
        assert outputs._parts.keys() == self.ended.keys(), "keys without outputs, or outputs without keys"
        for key, ended in self.ended.items():
            text = [token for part in outputs.parts(key) for token in part.text]
            num_tokens += len(text)
            kept = [list(each) for is_end, each in groupby(text, SEPARATOR.__eq__) if not is_end]
            assert kept == ended[-len(kept) :], "an output of others"
            assert min(len(ended), max(1, most // 2)) <= len(kept) <= most
            self.tally.kept += len(kept)
        assert num_tokens == outputs.num_tokens, "miscounted"

    def _check_followed(self, request: Request) -> None:
        """What a request follows stands in an output of its own key, as long as is said, and nowhere longer when it was looked for."""
        drafter = request.drafter
        follower = (drafter.text if isinstance(drafter, GrammarDrafter) else drafter).follower
        assert follower.key == (request.owner, request.params.prefix_space)
        if (part := follower._part) is None or follower._num_learned < len(request.tokens):
            return
        place, match = follower._place, follower.match
        assert part.text[place - match : place].tolist() == request.tokens[-match:], "it does not stand there"
        self.tally.followed += 1

    def _die(self, arrived: list[GenerateRequest], got: dict[tuple[str, int], list[int]], ended: set) -> None:
        """A new engine, to which clients bring what they have, in the order in which they had come."""
        self.tally.preemptions += self.scheduler.num_preemptions
        self._start_engine()
        self.tally.deaths += 1
        for source in arrived:
            keys = [(source.id, index) for index in range(source.params.n)]
            begun = [None if key in ended else got[key] for key in keys]
            if any(tokens is not None for tokens in begun):
                self._start(self.scheduler.add(msgspec.structs.replace(source, begun=begun)).jobs)
                self.tally.survivors += sum(bool(tokens) for tokens in begun)

    def _check_beam(self, source: GenerateRequest, index: int, tokens: list[int], reason: str | None) -> None:
        if reason is None:  # aborted
            assert not tokens, "a beam came before the end of its search"
            return
        want = beam_reference(source.prompt_ids, source.params, source.stop_ids, self.windows)[index]
        assert (tokens, reason) == (want[0], "stop" if want[1] else "length"), f"beam {index} of {source.id}"

    def _check_vector(self, source: GenerateRequest, vector: bytes | None, is_aborted: bool) -> None:
        if is_aborted:
            return
        assert vector is not None, f"no vector of {source.id}"
        sequence = Sequence(self.windows)
        *_, state = [sequence.state_after(token) for token in source.prompt_ids]
        start = int.from_bytes(vector[:8])
        assert vector == vector_of(start, state), f"vector of {source.id}"
        assert start == 0 or not source.needs_one_step, "computed in pieces"
        self.tally.vectors += 1

    def _count_runs(self, committed: Committed, num_used: int) -> None:
        plan, result = committed.plan, committed.result
        if not plan.drafts:
            return
        taken = {(delta.request_id, delta.index): len(delta.token_ids) for delta in committed.deltas}
        self.tally.accepted += sum(run - 1 for run in result.runs)
        counts = result.drafted or [len(draft.tokens) for draft in plan.drafts]
        self.tally.unproposed += sum(count == 0 for count in counts)
        self.tally.rejected += sum(count + 1 for count in counts) - sum(result.runs)
        self.tally.cut += sum(taken.values()) < len(result.tokens) and not result.late
        self.tally.given_back += max(0, num_used - self.cache.pool.num_used) if not committed.ended else 0

    def _hear(self, pages: PageChanges) -> None:
        assert not self.pages_reported.intersection(pages.stored), "stored twice"
        assert self.pages_reported.issuperset(pages.evicted), "evicted and never stored"
        assert not set(pages.stored).intersection(pages.evicted), "both"
        self.pages_reported |= set(pages.stored)
        self.pages_reported -= set(pages.evicted)

    def check_invariants(self) -> None:
        scheduler, pool, tables = self.scheduler, self.cache.pool, self.cache.tables
        assert not audit(self.cache)
        listens = pool.changes is not None
        assert self.pages_reported == (set(self.cache.findable_keys()) if listens else set()), "pages untold"
        running, waiting = scheduler.running, [*scheduler.waiting]
        orders = [request.order for request in running]
        assert orders == sorted(orders), "running is in the policy's order"
        for request in waiting if not self.has_grammars else ():  # else as _check_entries() has it
            if not request.is_primary or (
                request.gives_way and self.policy == "priority"
            ):  # preempted for one of a lower rank
                continue
            own = request.order
            younger = [(other, order) for other, order in zip(running, orders, strict=True) if order > own]
            assert all(other.gives_way or order[0] > own[0] for other, order in younger), "overtaking within a rank"
        self._check_turns(waiting)
        if waiting and running:
            last = max([request.sequence for request in running])
            self.tally.overtaken += last > min([request.sequence for request in waiting])
        rows = [request.row for request in running] + scheduler.rows.free
        assert sorted(rows) == self.all_rows, "row drift"
        filled, allocated = scheduler.slot_use()
        num_owned = len(pool.refs) - pool.refs.count(0)
        assert allocated == num_owned * self.page_size and 0 <= filled <= allocated
        for request in running:
            if not (request.drafted or request.late_steps or search_of(request)):
                most = -(-request.length // self.page_size)
                for table in tables.get(request.sequence, ()):
                    assert table.end <= most, "pages for tokens that do not count"
            if request.drafter is not None and request.has_output and not request.late_steps:
                full = (request.computed - request.drafted) // self.page_size
                for table in tables[request.sequence]:
                    unfinished = table.pages[max(full - table.first, 0) :]
                    assert all(pool.keys[page] is None for page in unfinished), "published before its tokens count"
        for of_sequence in tables.values():
            for table, most in zip(of_sequence, self.most_pages, strict=True):
                assert table.first == 0 or most, "a group without a window keeps everything"
                assert not most or len(table.pages) <= most

    def _check_turns(self, waiting: list[Request]) -> None:
        """Each response has one primary: its oldest open sequence. All others give way."""
        by_response: dict[str, list[Request]] = {}
        for request in self.scheduler.requests():
            beams = search_of(request)
            if not beams or request is beams[0]:
                by_response.setdefault(request.response_id, []).append(request)
            else:
                assert request.order[:3] == beams[0].order[:3], "a beam apart from its search"
        for requests in by_response.values():
            requests.sort(key=by_sequence)
            primary = requests[0]
            assert primary.is_primary, "one is primary"
            for request in requests[1:]:
                assert request.num_siblings_ahead and request.gives_way, "one is primary"
            gives_way = primary.gives_way
            assert gives_way == (primary.place > primary.sequence), "one that becomes primary later has a later place"
            self.tally.promoted += gives_way
        assert self.scheduler.siblings._open.keys() == by_response.keys(), "responses leaked"
        backlog = self.scheduler.waiting.primaries
        lens = [request.prompt_len for request in waiting if request.is_primary]
        assert backlog.num_requests == len(lens), "miscounted"
        assert backlog.num_tokens == sum(lens), "miscounted"

    def _check_all_returned(self) -> None:
        assert not audit(self.cache, is_idle=True)
        assert not self.cache.tables and not self.cache.host_tables, "tables leaked"
        assert len(self.scheduler.rows.free) == self.rows, "rows leaked"
        assert not len(self.scheduler.waiting) and not self.scheduler.running and not self.scheduler.awaiting_grammar
        grammar_cache = self.scheduler.grammar_cache
        assert not (grammar_cache._held or grammar_cache._later or grammar_cache._users), "grammars leaked"

    def _count(self, plan) -> None:
        self.tally.drafts += sum(len(draft.tokens) for draft in plan.drafts)
        self.tally.sat_out += sum(request.drafted > 0 for request in self.scheduler.running) - len(plan.drafts)
        self.tally.lost += sum(request.drafted > 0 for request in self.scheduler.waiting)
        self.tally.swaps += sum(move.kind == "out" for move in plan.moves)
        self.tally.forced += len(plan.forced)
        self.tally.copies += sum(move.kind == "copy" for move in plan.moves)
        entering = [pages for enter in plan.enters if enter.row in plan.rows for pages in enter.pages]
        self.tally.short_hits += sum(pages[:1] == [0] and pages.count(0) > 1 for pages in entering)
        self.tally.passed += sum(
            table.first for tables in self.cache.tables.values() for table in tables if table.first
        )
        self.tally.forks += sum(enter.row not in plan.rows for enter in plan.enters)
