"""Recomputation: computes a recording's steps again with the model, plan by plan, and compares the tokens.

A recording does not hold the contents of pages. Those of requests that run when it begins are computed first; a prefix that was in
the cache by then is computed when a request finds it, from the request's own tokens."""

import dataclasses
import threading
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from octavo.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig, replace
from octavo.engine.build import load_executor
from octavo.errors import ConfigError
from octavo.messages import EngineReport, Entering, StepPlan, StepResult
from octavo.recording.format import Arrived, Header, Recording
from octavo.replay.replay import Replay, ReplayedCommit, ReplayedPlan
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.request import Request
from octavo.schedule.results import runs_of
from octavo.weights.sources.source import ModelSource, resolve


class TokenDifference(NamedTuple):
    step: int
    request: str
    choice: int
    recorded: int
    computed: int


@dataclasses.dataclass
class Findings:
    num_steps: int = 0
    num_tokens: int = 0
    num_same: int = 0
    first: TokenDifference | None = None


def config_of(header: Header) -> Config:
    """The settings of the recorded engine, with the measured value in place of every auto."""
    report = header.report
    config = Config(
        ModelConfig(**header.options["model"]),
        CacheConfig(**header.options["cache"]),
        SchedulerConfig(**header.options["scheduler"]),
        ParallelConfig(**header.options["parallel"]),
    )
    found = {
        "max_num_seqs": report.max_num_seqs,
        "max_num_batched_tokens": report.max_num_batched_tokens,
        "max_model_len": report.max_model_len,
    }
    if report.num_pages:
        found["kv_cache_memory_bytes"] = report.num_pages * report.page_bytes
    return replace(config, **found)


def source_of(header: Header, model: str) -> ModelSource:
    """`model`: where to find it; empty: at its recorded path."""
    if model:
        return resolve(model)
    if Path(header.model_path).exists():
        kind = cast(Literal["folder", "gguf"], header.model_kind)
        return ModelSource(path=Path(header.model_path), name=header.model, kind=kind)
    raise ConfigError(f"the recorded model is not at {header.model_path} any more: say where it is with --model")


_ADAPTERS = (
    "the recording has requests with adapters, whose tokens cannot be computed again: replay it without computing"
)


class Recomputation:
    """Computes every step when it is planned, so that none overlaps."""

    def __init__(self, recording: Recording, model: str = "") -> None:
        header = recording.header
        if not header.with_tokens:
            raise ConfigError(
                "the recording has no token ids, so nothing can be computed from it: record with --record-tokens"
            )
        state = recording.state.scheduler
        if any(header.report.windows) and (state.cache.tables or state.cache.keys):
            raise ConfigError(
                "the recording begins in the middle of a run, and pages that layers with a window had freed cannot be computed again: "
                "give one that begins with its engine (a larger --record-bytes)"
            )
        if any("adapter" in request.params for request in state.requests):
            raise ConfigError(_ADAPTERS)
        if state.cache.host_tables:
            raise ConfigError("the recording begins with requests on swapped pages, which cannot be computed again")
        self.replay = Replay(recording, self._start)
        self.findings = Findings()
        self._header = header
        self._results: deque[StepResult] = deque()
        self._recording_ready = [*state.grammar_cache.ready, *state.grammar_cache.compiling]
        self._known: set[int] = set()  # pages whose content was computed here
        self._executor = load_executor(config_of(header), source_of(header, model))

    def run(self) -> Findings:
        try:
            self._check(self._executor.start())
            for grammar in self._recording_ready:
                self._prepare(grammar, [])
            self._warm_up()
            for happening in self.replay.follow():
                match happening:
                    case Arrived() if "adapter" in happening.params:
                        raise ConfigError(_ADAPTERS)
                    case ReplayedPlan() if not happening.plan.is_empty and happening.is_same:
                        self._compute(happening)
                    case ReplayedCommit():
                        self._compare(happening, self._results.popleft())
        finally:
            self._executor.close()
        return self.findings

    def _start(self, job: GrammarJob) -> None:
        """Compile it at once, before a plan can need it."""
        self._prepare(job.grammar, job.forgets)

    def _prepare(self, grammar: str, forgets: list[str]) -> None:
        is_done = threading.Event()
        self._executor.prepare(grammar, forgets, lambda num_bytes: is_done.set())
        is_done.wait()

    def _check(self, report: EngineReport) -> None:
        then = self._header.report
        for name in ("num_pages", "page_size", "vocab_size", "max_num_seqs", "windows"):
            if getattr(report, name) < getattr(then, name):
                raise ConfigError(
                    f"{name} is {getattr(report, name)} here and was {getattr(then, name)}: the steps cannot be carried out"
                )

    def _compute(self, happening: ReplayedPlan) -> None:
        """Compute the plan, after the cached pages that it relies on."""
        plan, page_size = happening.plan, self.replay.cache.page_size
        self._known.update(move.target for move in plan.moves if move.kind != "out")
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        for enter in plan.enters:
            # A choice that forks is not in the plan's rows: it shares the pages of the choice that it forks from.
            num_cached = starts.get(enter.row, 0) // page_size
            if any(page not in self._known for page in enter.pages[0][:num_cached]):
                self._fill(plan.leaves, enter, num_cached * page_size)
                plan = msgspec.structs.replace(plan, leaves=[*plan.leaves, enter.row])
        self._results.append(self._in_time(plan, happening.requests, self._carry_out(plan)))
        for request in happening.requests:
            self._note_pages(request)

    def _warm_up(self) -> None:
        for request in self.replay.scheduler.running:
            tables = self.replay.cache.tables.get(request.sequence)
            if tables is None:  # it waits to fork from the choice that computes its prompt
                continue
            enter = self.replay.scheduler._entering(request, [table.padded() for table in tables])
            self._fill([], enter, request.computed)
            self._note_pages(request)

    def _fill(self, leaves: list[int], enter: Entering, num_tokens: int) -> None:
        """Compute the first tokens of an entering row, in steps within the token budget."""
        most = self._header.report.max_num_batched_tokens
        enters = [enter]
        for start in range(0, num_tokens, most):
            count = min(most, num_tokens - start)
            self._carry_out(StepPlan(0, leaves, enters, [], [enter.row], [start], [count], [False], [], [], []))
            leaves, enters = [], []
        self._known.update(enter.pages[0][: num_tokens // self._header.report.page_size])

    def _carry_out(self, plan: StepPlan) -> StepResult:
        self._executor.submit(plan)
        return self._executor.collect()

    def _in_time(self, plan: StepPlan, requests: list[Request], result: StepResult) -> StepResult:
        """Compute the last token of rows whose mask is late again, until it is there: which masks were late is up to the recording."""
        drafted = {draft.at: len(draft.tokens) for draft in plan.drafts}
        runs = runs_of(plan, result)
        rows = [
            (row, start + count - 1 - drafted.get(at, 0) + place)
            for at, (request, row, start, count, samples) in enumerate(
                zip(requests, plan.rows, plan.starts, plan.counts, plan.samples, strict=True)
            )
            if samples and request.pooling is None
            for place in range(runs.get(at, 1))
        ]
        tokens = list(result.tokens)
        for at, token in zip(result.late, self._sample(plan.step, [rows[at] for at in result.late]), strict=True):
            tokens[at] = token
        return msgspec.structs.replace(result, tokens=tokens, late=[])

    def _sample(self, step: int, places: list[tuple[int, int]]) -> list[int]:
        """Compute the token of each row at its position, and sample after it, as often as it takes for its mask to be there."""
        tokens, late = [0] * len(places), list(range(len(places)))
        while late:
            again = [places[at] for at in late]
            columns = ([row for row, _ in again], [last for _, last in again], [1] * len(again), [True] * len(again))
            found = self._carry_out(StepPlan(step, [], [], [], *columns, [], [], []))
            for at, token in zip(late, found.tokens, strict=True):
                tokens[at] = token
            late = [late[at] for at in found.late]
        return tokens

    def _rest_of_run(self, plan: StepPlan, place: int, request: Request, run: int, recorded: int) -> list[int]:
        """The tokens by which a run is shorter than the recorded one, because a mask behind a drafted token was late here. The row must
        have them before the next plan goes on from there."""
        row = plan.rows[place]
        if request.row != row:  # it has left, so that no later plan needs them
            return []
        (num_drafted,) = (len(draft.tokens) for draft in plan.drafts if draft.at == place)
        last = plan.starts[place] + plan.counts[place] - 1 - num_drafted
        return [self._sample(plan.step, [(row, last + behind)])[0] for behind in range(run, recorded)]

    def _note_pages(self, request: Request) -> None:
        for table in self.replay.cache.tables.get(request.sequence, ()):
            self._known.update(table.pages)

    def _compare(self, happening: ReplayedCommit, result: StepResult) -> None:
        findings, outcome = self.findings, happening.outcome
        findings.num_steps += 1
        recorded_runs = runs_of(happening.plan, msgspec.structs.replace(result, runs=outcome.runs))
        runs = runs_of(happening.plan, result)
        theirs, ours = iter(enumerate(outcome.tokens)), iter(result.tokens)
        sampled: list[tuple[int, Request, int, int]] = []
        for place, (request, samples) in enumerate(zip(happening.requests, happening.plan.samples, strict=True)):
            if samples and request.pooling is None:
                # A run may be longer than the recorded one, which a late mask has cut, or shorter, if one was late here.
                their_run = list(islice(theirs, recorded_runs.get(place, 1)))
                our_run = list(islice(ours, runs.get(place, 1)))
                if len(our_run) < len(their_run):
                    our_run += self._rest_of_run(happening.plan, place, request, len(our_run), len(their_run))
                pairs = zip(their_run, our_run, strict=False)
                sampled += [(at, request, recorded, computed) for (at, recorded), computed in pairs]
        for at, request, recorded, computed in sampled:
            if request.params.use_beam_search or at in outcome.late:
                continue  # the search chooses the token, or none was sampled
            findings.num_tokens += 1
            findings.num_same += recorded == computed
            if recorded != computed and findings.first is None:
                step = happening.plan.step
                findings.first = TokenDifference(step, request.id, request.index, recorded, computed)
