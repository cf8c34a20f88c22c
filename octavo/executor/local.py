"""LocalExecutor: the one rank lives in this process. A GPU computes beside us, and so does a CPU where a step has many rows.
Knows nothing of requests or of how a step is computed."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config import Config
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.weights.sources.source import ModelSource
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import settle
from octavo.worker.runner import Runner
from octavo.worker.step import Step

# A CPU's step of fewer rows is over before it pays to hand it to a thread and to plan beside it.
_MANY_ROWS = 6


class LocalExecutor:
    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        self._loader = Loader(config, source)
        self._runner: Runner | None = None  # between start() and close()
        self.overlap = self._loader.device.is_cuda
        # Native code computes a step and leaves the interpreter to us, who make the next plan and send tokens meanwhile.
        self._thread = None if self._loader.device.is_cuda else ThreadPoolExecutor(1, "octavo-step")
        self._steps: deque[Step | Future[StepResult]] = deque()

    def start(self) -> EngineReport:
        report = settle(self._config.cache, [self._loader.load()])
        self._runner, notes = self._loader.allocate(report.num_pages, report.num_host_pages)
        del self._loader  # what it holds is the runner's from now on
        report.notes.extend(notes)
        return report

    def submit(self, plan: StepPlan) -> None:
        assert self._runner is not None, "closed"
        if self._thread is not None:
            self.overlap = len(plan.rows) >= _MANY_ROWS
            if self.overlap or self._steps:  # one after the other
                self._steps.append(self._thread.submit(_compute, self._runner, plan))
                return
        self._steps.append(self._runner.launch(plan))

    def collect(self) -> StepResult:
        return self._steps.popleft().result()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        assert self._runner is not None, "closed"
        self._runner.rows.sampling.grammars.prepare(grammar, forgets, done)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._runner = None


def _compute(runner: Runner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).result()
