"""LocalExecutor: one rank, in this process. A GPU computes in the background; so does a CPU, on a thread, if a step has many
rows."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.weights.sources.source import ModelSource
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import settle
from octavo.worker.page_mover import PageMover, open_mover
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
        self._steps: deque[LaunchedStep | Future[StepResult]] = deque()

    def start(self) -> EngineReport:
        report = settle(self._config.cache, [self._loader.load()])
        self._runner, notes = self._loader.allocate(report.num_pages, report.num_host_pages)
        report = msgspec.structs.replace(report, one_row_seconds=self._loader.time_one_row())
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

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        assert self._runner is not None, "closed"
        self._runner.rows.sampling.grammars.prepare(grammar, forgets, done)

    def give_back(self, pages: list[int]) -> None:
        assert self._runner is not None, "closed"
        self._runner.pages.give_back(pages)

    def open_tier(self, folder: str, max_bytes: int, layout: str) -> PageMover:
        assert self._runner is not None, "closed"
        try:
            return open_mover(self._runner.pages, folder, max_bytes, layout)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--kv-tier: {folder} cannot be used here: {error}") from None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._runner is not None:
            self._runner.rows.sampling.grammars.close()
        self._runner = None


def _compute(runner: Runner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).result()
