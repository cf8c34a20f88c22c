"""Random workloads through a real loop with a recorder, on the oracle's device, for the tests that replay recordings."""

import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.cache import KVCache
from octavo.engine.build import build_engine
from octavo.messages import Abort, EngineReport, GenerateRequest, StepPlan, StepResult
from octavo.messages.speculation import SpeculationSettings
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.recording.format import FORMAT, Header
from octavo.recording.recorder import Recorder, Segments
from octavo.recording.ring import RecordingRing
from octavo.schedule import POLICIES, Fairness, Scheduler
from octavo.schedule.drafts.lengths import speculation
from octavo.schedule.grammar_cache import GrammarCache
from octavo.schedule.stall_limit import StallLimit
from tests.schedule.oracle import OracleDevice
from tests.schedule.workload import Workload

ROOT = b"a secret"


class OracleExecutor:
    """Computes at submission; `overlap`: the loop makes its next plan before it collects the result."""

    def __init__(self, device: OracleDevice, overlap: bool) -> None:
        self.overlap, self._device = overlap, device
        self._results: deque[StepResult] = deque()
        self.tokens: list[list[int]] = []
        self.preparing: deque[Callable[[int], None]] = deque()
        self.grammars: list[str] = []  # grammars to prepare, in order
        self._started, self._seconds = time.monotonic(), 0.0
        self._durations: deque[float] = deque()  # of steps in flight

    def clock(self) -> float:
        """A clock by which a step takes 20 µs for each row, and 10 µs for each further token."""
        return self._started + self._seconds

    def submit(self, plan: StepPlan) -> None:
        self._durations.append(1e-5 * (len(plan.rows) + sum(plan.counts)))
        result = self._device.run(plan)
        self.tokens.append(result.tokens)
        self._results.append(result)

    def collect(self) -> StepResult:
        self._seconds += self._durations.popleft()
        return self._results.popleft()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        self.grammars.append(grammar)
        if grammar:
            self.preparing.append(done)
        else:  # to forget others takes no time: a loop that waits for a grammar is not helped by it
            done(0)

    def close(self) -> None:
        pass


def report_of(load: Workload) -> EngineReport:
    return EngineReport(
        device="none",
        dtype="float32",
        vocab_size=32,
        max_model_len=64,
        max_num_seqs=load.rows,
        max_num_batched_tokens=load.budget,
        page_size=load.page_size,
        num_pages=load.num_pages,
        num_host_pages=load.num_host_pages,
        weights_bytes=0,
        page_bytes=1,
        windows=load.windows,
        num_stages=load.num_stages,
        scheduling_policy=load.policy,
        is_fair=load.has_tenants,
        prefix_eviction="adaptive" if load.seed % 3 else "lru",
        # Steps take microseconds (OracleExecutor.clock): with this, prompts are cut.
        max_inter_token_ms=0.05 if load.has_limit else 0,
        # A draft of two tokens that came before is often wrong here, and now and then right.
        speculation=SpeculationSettings(
            ("ngram", "suffix", "draft_model")[load.seed % 3],
            prompt_lookup_min=1,
            prompt_lookup_max=2,
            is_adaptive=load.seed % 4 > 1,
            model="the oracle" if load.seed % 3 == 2 else "",
            max_cached_requests=(0, 1, 4, 8)[load.seed // 3 % 4] if load.seed % 3 == 1 else 0,
        )
        if load.has_drafts
        else None,
        one_row_seconds=2e-5 if load.has_drafts else 0.0,
        draft_seconds=4e-6 if load.has_drafts else 0.0,
    )


def header_of(report: EngineReport, shares: bool, with_tokens: bool) -> Header:
    options = {"cache": {"enable_prefix_caching": shares}}
    root = ROOT if with_tokens else b""
    return Header(FORMAT, "test", 0.0, 0.0, "1", with_tokens, "none", "", "folder", options, report, root)


class Recorded:
    """One recorded workload. `roll`: probability that a new file begins after an iteration."""

    def __init__(
        self,
        load: Workload,
        folder: Path,
        with_tokens: bool,
        roll: float = 0.0,
        limit: int = 2**24,
        ring: RecordingRing | None = None,
        name: str = "1",
        aborts: bool = True,
    ) -> None:
        self.load, self.folder = load, folder
        self.report = report_of(load)
        cache = KVCache(
            load.num_pages,
            load.page_size,
            load.num_host_pages,
            load.shares,
            None,
            load.windows,
            load.budget,
            ROOT,
            self.report.prefix_eviction,
        )
        policy = POLICIES[load.policy]
        stall_limit = StallLimit.of(self.report.max_inter_token_ms)
        drafts = speculation(self.report.speculation)
        scheduler = Scheduler(
            cache,
            load.rows,
            load.budget,
            load.page_size,
            policy,
            stall_limit,
            load.num_stages,
            drafts,
            Fairness(load.rows, load.budget) if load.has_tenants else None,
        )
        grammar_cache = load.scheduler.grammar_cache
        scheduler.grammar_cache = GrammarCache(grammar_cache._max_used, grammar_cache._max_unused)
        lateness = random.Random(load.seed + 7 * 10**9) if load.has_late else None
        self.executor = OracleExecutor(
            OracleDevice(
                load.page_size,
                load.rows,
                load.windows,
                lateness,
                load.num_stages,
                random.Random(load.seed + 13 * 10**9),
            ),
            bool(load.depth),
        )
        clock = self.executor.clock if load.has_limit or load.has_drafts else time.monotonic
        self.loop = build_engine(scheduler, self.executor, EngineMetrics("none", self.report), clock).loop
        header = header_of(self.report, load.shares, with_tokens)
        self.recorder = Recorder(Segments(folder, name, limit), header, ring or RecordingRing())
        self.loop.record(self.recorder)
        self._roll, self._aborts = roll, aborts

    def _held(self, request: GenerateRequest, r: random.Random) -> GenerateRequest:
        """Of every second workload, some requests ask for their pages to stay, by turns of a few conversations; a part of them for no time."""
        if self.load.seed % 2 or r.random() < 0.5:
            return request
        session, seconds = r.choice(["", "a", "b"]), r.choice([1e-6, 60.0])
        return msgspec.structs.replace(request, session=session, retain_seconds=seconds)

    def run(self, most_turns: int = 10**6) -> None:
        """Run the whole workload, with aborts and resets as in the scheduler's own tests."""
        load, loop = self.load, self.loop
        r, sizes = random.Random(load.seed + 4 * 10**9), random.Random(load.seed)
        turn = 0
        preparing = self.executor.preparing
        while (load.arrivals or loop.has_work or preparing) and turn < most_turns:
            while load.arrivals and load.arrivals[0][0] <= turn:
                loop.add(self._held(load.arrivals.pop(0)[1], r))
            if r.random() < 0.04 * self._aborts and not loop.scheduler.is_idle:
                victim = r.choice(sorted(loop.scheduler.request_ids()))
                loop.abort(Abort(victim, r.choice([-1, 0])))
            if r.random() < 0.02:
                loop.reset_prefixes()
            if r.random() < self._roll:
                self.recorder.is_due = True
            if preparing and (r.random() < 0.4 or not loop.has_work):
                preparing.popleft()(sizes.randrange(2**30))  # two or more of them are all that fits
            loop.step()
            turn += 1
