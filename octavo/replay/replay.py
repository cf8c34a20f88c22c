"""Replay: makes a recording's plans again, with the scheduler and the cache that serve, and finds the first plan that differs.

A recording without token ids is replayed with made-up ones: a request's prompt is one number repeated, a choice's output another.
What these cannot reproduce is recorded: the keys of pages in the order in which they were made, and the tokens that ended
requests."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from octavo import __version__
from octavo.cache import KVCache
from octavo.errors import ConfigError
from octavo.messages import Candidates, Draft, GenerateRequest, Logprobs, StepPlan, StepResult, TokenDelta
from octavo.recording.format import (
    KEY_BYTES,
    Aborted,
    Arrived,
    Costed,
    Forgotten,
    Header,
    Limited,
    LoadBegan,
    LoadEnded,
    Marked,
    Outcome,
    PrefixesHeld,
    Prepared,
    Recording,
    Stepped,
    digest,
    params_of,
)
from octavo.schedule import POLICIES, Fairness, Scheduler
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.drafts.base import Offer
from octavo.schedule.drafts.lengths import speculation
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.repetition import Loops
from octavo.schedule.request import Request
from octavo.schedule.results import Planned, Returned
from octavo.schedule.snapshot import RecordedLoops, RequestState, restore
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts, StepShape

_NO_SCORES = Logprobs(0, [], [])


class ReplayedPlan(NamedTuple):
    """A plan was made again."""

    micros: int
    plan: StepPlan
    is_same: bool
    requests: list[Request]  # of its rows
    admitted: list[Request]
    returned: list[Returned]


class ReplayedCommit(NamedTuple):
    """A step's outcome was taken in."""

    micros: int
    plan: StepPlan
    requests: list[Request]
    outcome: Outcome
    deltas: list[TokenDelta]
    candidates: dict[tuple[str, int, int], Candidates]  # of beams: request, place in its group, tokens so far


Happening = (
    Arrived
    | Aborted
    | Forgotten
    | Prepared
    | Costed
    | Limited
    | LoadBegan
    | LoadEnded
    | PrefixesHeld
    | Marked
    | ReplayedPlan
    | ReplayedCommit
)


def prompt_token(first_sequence: int) -> int:
    """The made-up token of a prompt whose first choice has this sequence. Negative, so that it is never a stop id."""
    return -2 * first_sequence - 2


def output_token(sequence: int) -> int:
    return -2 * sequence - 3


class _UnknownText:
    """A drafter's place: what it proposes is not on record, only how much."""

    def learn(self, tokens: Sequence[int]) -> None:
        pass

    def drafts(self, most: int) -> Offer:
        return Offer([], [])

    def verified(self, num_tokens: int, num_drafted: int, num_right: int, source: int = 0) -> None:
        pass


class RecordedSpeculation:
    """Drafts as many tokens as the recorded plan did, made-up ones."""

    def __init__(self) -> None:
        self.next: list[tuple[int, int]] = []  # as in Stepped, of the plan that is made next

    def attach(self, request: Request) -> None:
        request.drafter = _UnknownText()

    def finished(self, request: Request) -> None:
        pass

    def forget(self) -> None:
        pass

    def choose(
        self,
        rows: Sequence[tuple[int, Request]],
        shape: StepShape,
        costs: StepCosts | None,
        room: int,
        limit: StallLimit | None = None,
    ) -> list[Draft]:
        requests = dict(rows)
        return [Draft(at, [output_token(requests[at].sequence)] * count) for at, count in self.next if at in requests]

    def wants_drain(
        self, num_steps: int, requests: Sequence[Request], shape: StepShape, costs: StepCosts | None
    ) -> bool:
        return False


class RecordedKeysCache(KVCache):
    """A cache that takes page keys from the recording where there are no tokens to make them from."""

    _reuses_keys = False

    def __init__(self, header: Header) -> None:
        report = header.report
        super().__init__(
            report.num_pages,
            report.page_size,
            report.num_host_pages,
            bool(header.options["cache"]["enable_prefix_caching"]),
            report.num_warm_pages,
            report.windows,
            report.max_num_batched_tokens,
            header.root,
            report.prefix_eviction,
        )
        self._has_recorded_keys = not header.with_tokens
        self.recorded_keys: deque[bytes] = deque()
        self.known: dict[tuple[int, int], bytes] = {}  # (last token of a page, its place) → its key
        self.num_missing_keys = 0  # keys that the recording does not have: the plans differ

    def _key(self, parent: bytes, tokens: list[int], i: int) -> bytes:
        if not self._has_recorded_keys:
            return super()._key(parent, tokens, i)
        name = (tokens[(i + 1) * self.page_size - 1], i)
        if self.recorded_keys:
            self.known[name] = self.recorded_keys.popleft()
            return self.known[name]
        self.num_missing_keys += 1
        return self.known.get(name, b"%d %d" % name)


def _cannot(what: str, header: Header, error: Exception) -> ConfigError:
    reason = f"another version wrote it: {header.version}, and this is {__version__}"
    if header.version == __version__:
        reason = "it is damaged, or this is a fault of Octavo's"
    return ConfigError(f"{what} ({type(error).__name__}: {error}): {reason}")


class Replay:
    """Follows a recording once, to its end or to the first plan that is not the same."""

    def __init__(self, recording: Recording, start: Callable[[GrammarJob], None] = lambda job: None) -> None:
        """`start`: called for every grammar that the engine began to compile. Raises ConfigError where the state cannot be taken
        up."""
        self._start = start
        try:
            self._begin(recording)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise _cannot("the recording's state cannot be taken up", recording.header, error) from error

    def _begin(self, recording: Recording) -> None:
        self.header = header = recording.header
        self.cache = RecordedKeysCache(header)
        report = header.report
        self._recorded = None if report.speculation is None or header.with_tokens else RecordedSpeculation()
        self.scheduler = Scheduler(
            self.cache,
            report.max_num_seqs,
            report.max_num_batched_tokens,
            swap_min_tokens=report.page_size,
            policy=POLICIES[report.scheduling_policy],
            stall_limit=StallLimit.of(report.max_inter_token_ms),
            speculation=self._recorded or speculation(report.speculation),
            num_stages=report.num_stages,
            fairness=Fairness(report.max_num_seqs, report.max_num_batched_tokens) if report.is_fair else None,
        )
        self._records = recording.records
        self.sources: dict[str, GenerateRequest] = {}  # the request of the Arrived that was yielded last
        self._first: dict[str, int] = {}  # request → its first choice's sequence
        for state in recording.state.scheduler.requests:
            sequence, name, index = state.kept[:3]
            self._first[name] = min(self._first.get(name, sequence), sequence - index)
        restore(self.scheduler, recording.state.scheduler, params_of, self._tokens_of)
        for request in self.scheduler.requests():
            self._settle(request)
        self._learn_keys()
        self._num_rows = -1  # of the previous plan; −1: none
        self._flight: deque[Planned] = deque()
        self.num_steps = 0  # plans with something in them
        self.num_same = 0
        self.most_in_flight = 0
        self.overlap_rows = 0  # the fewest rows of a step that was computed while the next plan was made

    def follow(self) -> Iterator[Happening]:
        """Raises ConfigError where the recording contradicts the scheduler's state."""
        try:
            yield from self._follow()
        except (AssertionError, LookupError, StopIteration, RuntimeError, TypeError, ValueError) as error:
            where = f"after step {self.scheduler.num_steps} the recording cannot be followed"
            raise _cannot(where, self.header, error) from error

    def _follow(self) -> Iterator[Happening]:
        for record in self._records:
            match record:
                case Arrived():
                    source = self.sources[record.id] = self._request_of(record)
                    self._start_all(self.scheduler.add(source).jobs)
                    for request in self.scheduler.choices(record.id):
                        self._settle(request)
                    yield record
                    self.sources.pop(record.id, None)
                case Aborted():
                    yield record
                    removed = self.scheduler.abort(record.id, record.index)
                    self._start_all([] if removed is None else removed.jobs)
                case Forgotten():
                    self.cache.reset_prefixes()
                    if self.scheduler.speculation is not None:
                        self.scheduler.speculation.forget()
                    yield record
                case Prepared():
                    yield record
                    self._start_all(self.scheduler.prepared({record.grammar: record.num_bytes}).jobs)
                case Costed():
                    self.scheduler.learn(record.costs)
                    yield record
                case LoadBegan():
                    self.cache.begin_load(record.ticket, record.held, record.count)
                    yield record
                case LoadEnded():
                    self.cache.end_load(record.ticket, record.count, record.keys)
                    yield record
                case PrefixesHeld():
                    self.cache.hold(record.held)
                    self.cache.let_go(record.released)
                    yield record
                case Limited():
                    self.cache.pool.limit_touched(record.num_warm)
                    yield record
                case Marked():
                    self._num_rows, self.cache._head = -1, (-1, 0, [])
                    yield record
                case Stepped():
                    yield from self._step(record)
                    if self.num_same < self.num_steps:
                        return

    def next_plan(self) -> tuple[StepPlan, list[Request]] | None:
        """The plan after the last recorded one: an engine that was killed was about to carry it out, or did. None: it is empty, or the
        recording does not hold enough to make it."""
        planned = self.scheduler.plan()
        if planned.plan.is_empty or self.cache.num_missing_keys:
            return None
        return planned.plan, planned.requests

    def _step(self, record: Stepped) -> Iterator[Happening]:
        keys = record.keys
        self.cache.recorded_keys.extend(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        if self._recorded is not None:
            self._recorded.next = record.drafts
        outcomes = deque(record.outcomes)
        if (
            outcomes and self._flight and self._flight[0].plan.drafts
        ):  # the loop has committed it before it made this plan
            yield self._commit(record, outcomes.popleft())
        planned = self.scheduler.plan()
        plan = planned.plan
        is_same = digest(plan, self._num_rows) == record.digest
        self._num_rows = len(plan.rows)
        if not plan.is_empty or not is_same:
            self.num_steps += 1
            self.num_same += is_same
        if not plan.is_empty:
            self._flight.append(planned)
        yield ReplayedPlan(record.micros, plan, is_same, planned.requests, planned.admitted, planned.returned)
        if not is_same:
            return
        for outcome in outcomes:
            yield self._commit(record, outcome)
        if self._flight and not plan.is_empty:
            self.overlap_rows = min(self.overlap_rows or len(plan.rows), len(plan.rows))
        self.most_in_flight = max(self.most_in_flight, len(self._flight))

    def _commit(self, record: Stepped, outcome: Outcome) -> ReplayedCommit:
        done = self._flight.popleft()
        if done.num_tokens != outcome.num_tokens:
            raise ValueError(f"step {done.plan.step} has {done.num_tokens} tokens, and had {outcome.num_tokens}")
        candidates = _by_beam(done, outcome) if outcome.candidates else {}
        committed = self.scheduler.commit(done.plan, self._result(done, outcome))
        self._start_all(committed.jobs)
        return ReplayedCommit(record.micros, done.plan, done.requests, outcome, committed.deltas, candidates)

    def _start_all(self, jobs: list[GrammarJob]) -> None:
        for job in jobs:
            self._start(job)

    # ── stand-ins for what is not recorded ──

    def _request_of(self, record: Arrived) -> GenerateRequest:
        first = self._first[record.id] = self.scheduler._next_sequence
        prompt_ids, begun = record.prompt_ids, record.begun
        if not self.header.with_tokens:
            prompt_ids = [prompt_token(first)] * record.prompt_len
            begun = [
                None if length is None else [output_token(first + index)] * length
                for index, length in enumerate(record.begun_len)
            ]
        return GenerateRequest(
            record.id,
            prompt_ids,
            params_of(record.params),
            record.stop_ids,
            pooling=record.pooling,
            needs_one_step=record.needs_one_step,
            wants_progress=record.wants_progress,
            begun=begun,
            priority=record.priority,
            response_id=record.response_id,
            tenant=record.tenant,
            weight=record.weight,
            owner=record.owner,
        )

    def _tokens_of(self, state: RequestState) -> list[int]:
        if self.header.with_tokens:
            return list(state.tokens)
        sequence, name, prompt_len = state.kept[0], state.kept[1], state.kept[7]
        output = [output_token(sequence)] * (state.num_tokens - prompt_len)
        return [prompt_token(self._first[name])] * prompt_len + output

    def _settle(self, request: Request) -> None:
        if isinstance(request.special, Loops) and not self.header.with_tokens:
            assert request.params.repetition_detection is not None
            request.special = RecordedLoops(request.params.repetition_detection)

    def _learn_keys(self) -> None:
        """Learn the keys of pages that requests hold when the recording begins."""
        page_size, keys = self.cache.page_size, self.cache.pool.keys
        for request in self.scheduler.requests():
            for table in self.cache.tables.get(request.sequence, [])[:1]:
                for i, page in enumerate(table.pages, table.first):
                    key, end = keys[page], (i + 1) * page_size
                    if key is not None and end <= len(request.tokens):
                        self.cache.known[request.tokens[end - 1], i] = key

    def _result(self, planned: Planned, outcome: Outcome) -> StepResult:
        plan = planned.plan
        tokens, vectors, logprobs, prompt_logprobs = outcome.tokens, [], [], []
        ends = {(name, index): reason for name, index, reason in outcome.ended}
        made_up = []
        runs = {
            draft.at: (run, taken) for draft, run, taken in zip(plan.drafts, outcome.runs, outcome.taken, strict=True)
        }
        for at, (request, start, count, samples) in enumerate(
            zip(planned.requests, plan.starts, plan.counts, plan.samples, strict=True)
        ):
            last = request.prompt_len - 1
            if request.params.prompt_logprobs is not None and start < last:
                prompt_logprobs.append([_NO_SCORES] * (min(start + count, last) - start))
            if samples and request.pooling is not None:
                vectors.append(b"")
            elif samples:
                run, taken = runs.get(at, (1, 1))
                tokens_of_run = [output_token(request.sequence)] * run
                end = ends.get((request.id, request.index))
                if taken or end is not None:  # a stop token that a grammar forced ends its request, and is not taken in
                    tokens_of_run[max(taken, 1) - 1] = self._token(request, end)
                made_up += tokens_of_run
                if request.params.logprobs is not None and not request.params.use_beam_search:
                    logprobs += [_NO_SCORES] * run
        if not self.header.with_tokens:
            tokens = made_up
        failures = dict.fromkeys(outcome.failures, "")
        return StepResult(
            plan.step,
            tokens,
            vectors,
            logprobs,
            prompt_logprobs,
            failures,
            0.0,
            outcome.last,
            outcome.candidates,
            outcome.late,
            outcome.runs,
            outcome.drafted,
        )

    def _token(self, request: Request, end: str | None) -> int:
        if end == "stop" and request.stop_ids:
            return request.stop_ids[0]
        return RecordedLoops.LOOP if end == "repetition" else output_token(request.sequence)


def _by_beam(planned: Planned, outcome: Outcome) -> dict[tuple[str, int, int], Candidates]:
    """The candidates in an outcome, by beam; without those of requests that left their row since."""
    found, candidates = {}, iter(outcome.candidates)
    for request, epoch, samples in zip(planned.requests, planned.epochs, planned.plan.samples, strict=True):
        if samples and isinstance(request.special, BeamGroup):
            its, group = next(candidates), request.special
            if epoch == request.epoch and not request.is_finished:
                place = request.sequence - group.leader.sequence
                found[request.id, place, group.search._length()] = its
    return found
