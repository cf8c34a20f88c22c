"""LocalExecutor: one rank, in this process. A GPU computes in the background; so does a CPU, on a thread, if a step has many
rows."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config import Config, KVTiers
from octavo.errors import EngineDead
from octavo.messages import AdapterLoaded, AdapterRef, EngineReport, StepPlan, StepResult
from octavo.weights.sources.source import ModelSource
from octavo.worker.adapters import RankAdapters
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import settle, with_trials
from octavo.worker.page_mover import PageMover, open_mover
from octavo.worker.priority import LOADING, yield_to_steps
from octavo.worker.runner import Runner
from octavo.worker.step import LaunchedStep

# A CPU step with fewer rows is too short to gain from a thread and from planning in parallel.
_MANY_ROWS = 6


class LocalExecutor:
    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        self._loader = Loader(config, source)
        self._runner: Runner | None = None  # between start() and close()
        self.overlap = self._loader.device.is_cuda
        # Native code computes a step without the GIL: this thread makes the next plan and sends tokens meanwhile.
        self._thread = None if self._loader.device.is_cuda else ThreadPoolExecutor(1, "octavo-step")
        self._loading: ThreadPoolExecutor | None = None  # of adapters; made with the first
        self._steps: deque[LaunchedStep | Future[StepResult]] = deque()

    def start(self) -> EngineReport:
        report = settle(self._config.cache, [self._loader.load()])
        self._runner, notes = self._loader.allocate(report.num_pages, report.num_host_pages)
        report = with_trials(report, self._loader.time_steps())
        del self._loader  # what it holds is the runner's from now on
        report.notes.extend(notes)
        return report

    def submit(self, plan: StepPlan) -> None:
        assert self._runner is not None, "closed"
        if self._thread is not None:
            self.overlap = len(plan.rows) >= _MANY_ROWS
            if self.overlap or self._steps:  # steps must run in order: follow one that is on the thread
                self._steps.append(self._thread.submit(_compute, self._runner, plan))
                return
        self._steps.append(self._runner.launch(plan))

    def collect(self) -> StepResult:
        return self._steps.popleft().result()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        assert self._runner is not None, "closed"
        self._runner.rows.sampling.grammars.prepare(grammar, forgets, done)

    def adapter_itemsize(self) -> int:
        return self._adapters().itemsize

    def check_adapter(self, ref: AdapterRef) -> int:
        return self._adapters().check_files(ref)

    def load_adapter(self, ref: AdapterRef, done: Callable[[AdapterLoaded | str | EngineDead], None]) -> None:
        adapters = self._adapters()
        if self._loading is None:
            self._loading = ThreadPoolExecutor(1, "octavo-adapters", yield_to_steps, (LOADING,))
        self._loading.submit(lambda: done(adapters.load_or_say_why(ref)))

    def forget_adapters(self, ids: list[str]) -> None:
        self._adapters().forget(ids)

    def _adapters(self) -> RankAdapters:
        assert self._runner is not None and self._runner.adapters is not None, "closed, or without --enable-lora"
        return self._runner.adapters

    def give_back(self, pages: list[int]) -> None:
        assert self._runner is not None, "closed"
        self._runner.give_back(pages)

    def sleep(self, pages: list[int], keeps_pages: bool, moved: Callable[[], None]) -> None:
        self.give_back(pages)
        assert self._runner is not None, "closed"
        self._runner.sleep(keeps_pages, moved)

    def wake_up(self, moved: Callable[[], None]) -> None:
        assert self._runner is not None, "closed"
        self._runner.wake_up(moved)

    def open_tier(self, tiers: KVTiers, layout: str) -> PageMover:
        assert self._runner is not None, "closed"
        mover = open_mover(self._runner.pages, self._runner.device, tiers, layout)
        if (draft := self._runner.draft) is not None:
            mover.on_load = draft.filled.forget  # a tier has no pages of the draft model
        return mover

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._loading is not None:
            self._loading.shutdown(cancel_futures=True)
        if self._runner is not None:
            self._runner.rows.sampling.grammars.close()
        self._runner = None


def _compute(runner: Runner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).result()
