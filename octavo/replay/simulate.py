"""SimulatedRun: recorded requests through a scheduler with other settings, on an estimated clock."""

from collections import deque

from octavo.cache import KVCache
from octavo.cache.span import pages_of, pages_of_beams
from octavo.messages import Candidates, GenerateRequest, Logprobs, StepPlan, StepResult
from octavo.replay.stats import RunStats
from octavo.replay.what_if import Learned, ScheduleSettings
from octavo.schedule import POLICIES, Fairness, Scheduler
from octavo.schedule.beams.group import BeamGroup
from octavo.schedule.grammar_cache import GrammarJob
from octavo.schedule.repetition import Loops
from octavo.schedule.request import Request
from octavo.schedule.results import Planned
from octavo.schedule.snapshot import RecordedLoops
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts, shape_of

_NO_SCORES = Logprobs(0, [], [])
_AGAIN = "later"  # the end of a choice that was open when the recording ended


class _Cache(KVCache):
    """Prefix-cache keys for a recording without token ids: the recorded key where one exists, else a unique key that never
    matches."""

    _reuses_keys = False
    known: dict[tuple[int, int], bytes]
    has_recorded_keys: bool

    def _key(self, parent: bytes, tokens: list[int], i: int) -> bytes:
        if not self.has_recorded_keys:
            return super()._key(parent, tokens, i)
        name = (tokens[(i + 1) * self.page_size - 1], i)
        return self.known.get(name) or b"%d %d" % name


class SimulatedRun:
    def __init__(self, learned: Learned, settings: ScheduleSettings, pace: StepCosts) -> None:
        self._learned, self._pace = learned, pace
        header = learned.replay.header
        report = header.report
        self._recorded = {recorded.source.id: recorded for recorded in learned.requests}
        self._cache = _Cache(
            settings.num_pages, report.page_size, settings.num_host_pages, settings.enable_prefix_caching,
            report.num_warm_pages, report.windows, settings.max_num_batched_tokens, eviction=settings.prefix_eviction,
        )  # fmt: skip
        self._cache.known, self._cache.has_recorded_keys = learned.keys, not header.with_tokens
        fairness = Fairness(settings.max_num_seqs, settings.max_num_batched_tokens) if settings.fairness else None
        self._scheduler = Scheduler(
            self._cache, settings.max_num_seqs, settings.max_num_batched_tokens, report.page_size,
            POLICIES[settings.scheduling_policy], StallLimit.of(settings.max_inter_token_ms), report.num_stages,
            fairness=fairness,
        )  # fmt: skip
        self._scheduler.learn(pace)
        self._now = learned.start
        self._arrivals = deque(sorted(learned.requests, key=lambda recorded: recorded.seconds))
        leaving = [(recorded.left, recorded.source.id) for recorded in learned.requests if recorded.left is not None]
        self._leaving = deque(sorted(leaving))
        self._jobs: list[GrammarJob] = []  # grammars to be compiled
        self.tally = RunStats()

    def run(self) -> RunStats:
        scheduler, tally = self._scheduler, self.tally
        flight: deque[Planned] = deque()
        depth = 0
        while self._arrivals or not scheduler.is_idle:
            if scheduler.is_idle:
                self._now = max(self._now, self._arrivals[0].seconds)
            self._let_in()
            planned = scheduler.plan()
            is_empty = planned.plan.is_empty
            tally.planned(scheduler, planned.plan)
            if not is_empty:
                flight.append(planned)
                depth = self._learned.depth if len(planned.requests) >= self._learned.overlap_rows else 0
            elif not flight and not planned.returned and not self._wait():
                break  # nothing will ever change
            for _ in range(max(len(flight) - depth, int(is_empty and bool(flight)))):
                self._commit(flight.popleft())
        tally.end(scheduler)
        tally.queried_tokens, tally.hit_tokens = self._cache.queried_tokens, self._cache.hit_tokens
        return tally

    def _let_in(self) -> None:
        while self._arrivals and self._arrivals[0].seconds <= self._now:
            recorded = self._arrivals.popleft()
            if not self._fits(recorded.source):
                self.tally.num_refused += 1
                continue
            self.tally.arrived(recorded.source.id, recorded.seconds)
            if any(recorded.source.begun):
                self.tally.left(recorded.source.id)
            self._jobs += self._scheduler.add(recorded.source).jobs
            for request in self._scheduler.choices(recorded.source.id):
                if isinstance(request.special, Loops) and self._cache.has_recorded_keys:
                    assert request.params.repetition_detection is not None
                    request.special = RecordedLoops(request.params.repetition_detection)
        self._prepare()
        while self._leaving and self._leaving[0][0] <= self._now:
            name = self._leaving.popleft()[1]
            choices = self._scheduler.choices(name)
            if not self._recorded[name].was_waiting or all(choice.is_untouched for choice in choices):
                self._abort(name)
                self.tally.left(name)

    def _prepare(self) -> None:
        """Grammars are ready at once: the settings do not change how long compiling takes."""
        while self._jobs:
            self._jobs = self._scheduler.prepared({job.grammar: 0 for job in self._jobs if job.grammar}).jobs

    def _abort(self, name: str, index: int = -1) -> None:
        removed = self._scheduler.abort(name, index)
        self._jobs += [] if removed is None else removed.jobs

    def _fits(self, source: GenerateRequest) -> bool:
        """Whether the request would have been admitted with these settings."""
        scheduler, cache, params = self._scheduler, self._cache, source.params
        budget, prompt_len = scheduler.max_step_tokens, len(source.prompt_ids)
        if params.use_beam_search and params.num_sequences > scheduler.max_rows:
            return False
        if source.needs_one_step and prompt_len > budget:
            return False
        if not cache.pool.num_pages:
            return True
        assert params.max_tokens is not None
        shape = (cache.page_size, cache.windows, budget)
        most = prompt_len + params.max_tokens
        if params.use_beam_search:
            return pages_of_beams(prompt_len, most, params.num_sequences, *shape) <= cache.pool.num_pages
        return pages_of(most, *shape) <= cache.pool.num_pages

    def _wait(self) -> bool:
        """Advance the clock to the next arrival or abort. False: there is none."""
        moments = [self._arrivals[0].seconds] if self._arrivals else []
        moments += [self._leaving[0][0]] if self._leaving else []
        later = [moment for moment in moments if moment > self._now]
        if later:
            self._now = min(later)
        return bool(later)

    def _commit(self, planned: Planned) -> None:
        plan = planned.plan
        result, leaving = self._result(plan, planned.requests)
        seconds = self._pace.seconds(shape_of(plan, planned.num_tokens))
        self._now += seconds
        self.tally.seconds += seconds
        committed = self._scheduler.commit(plan, result)
        self._jobs += committed.jobs
        self.tally.gave(committed.deltas, self._now)
        for name, index in leaving:
            self._abort(name, index)
        self._prepare()

    def _result(self, plan: StepPlan, requests: list[Request]) -> tuple[StepResult, list[tuple[str, int]]]:
        """The step's result, and the choices that end with it for another reason than their tokens."""
        result = StepResult(plan.step, [], [], [], [], {}, 0.0, [], [])
        leaving: list[tuple[str, int]] = []
        for request, start, count, samples in zip(requests, plan.starts, plan.counts, plan.samples, strict=True):
            params, last = request.params, request.prompt_len - 1
            if params.prompt_logprobs is not None and start < last:
                result.prompt_logprobs.append([_NO_SCORES] * (min(start + count, last) - start))
            if not samples:
                continue
            if request.pooling is not None:
                result.vectors.append(b"")
            elif isinstance(request.special, BeamGroup):
                self._add_beam(request, request.special, result)
            else:
                self._add_token(request, result, leaving)
                if params.logprobs is not None:
                    result.logprobs.append(_NO_SCORES)
        return result, leaving

    def _add_token(self, request: Request, result: StepResult, leaving: list[tuple[str, int]]) -> None:
        recorded = self._recorded[request.id]
        outputs = recorded.outputs.get(request.index, [])
        at = len(request.tokens) - request.prompt_len
        end = recorded.ends.get(request.index, _AGAIN)
        is_last = at + 1 >= len(outputs)
        result.tokens.append(outputs[at] if at < len(outputs) else -1)
        if not is_last or request.is_finished:
            return
        if end == "length":
            result.last.append(len(result.tokens) - 1)  # a grammar may have ended it before max_tokens
        elif end == "error":
            result.failures[len(result.tokens) - 1] = ""
        elif end == _AGAIN:
            leaving.append((request.id, request.index))

    def _add_beam(self, request: Request, group: BeamGroup, result: StepResult) -> None:
        place = request.sequence - group.leader.sequence
        found = self._recorded[request.id].beams.get((place, group.search._length()))
        result.tokens.append(-1)
        if found is None and request.is_finished:
            found = Candidates([], [])
        if found is None:  # not recorded to its end
            self._abort(request.id)
            found = Candidates([], [])
        result.candidates.append(found)
