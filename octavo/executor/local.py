"""LocalExecutor: the one rank lives in this process. A CPU computes a step when it is submitted, a GPU beside us.
Knows nothing of requests or of how a step is computed."""

from collections import deque

from octavo.config import Config
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.weights.source import ModelSource
from octavo.worker.memory import settle
from octavo.worker.runner import Runner
from octavo.worker.step import Step


class LocalExecutor:
    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        runner = Runner(config, source)
        self._runner: Runner | None = runner
        self.overlap = runner.device.is_cuda
        self._steps: deque[Step] = deque()

    def start(self) -> EngineReport:
        assert self._runner is not None, "closed"
        report = settle(self._config.cache, [self._runner.load()])
        report.notes.extend(self._runner.allocate(report.num_pages, report.num_host_pages))
        return report

    def submit(self, plan: StepPlan) -> None:
        assert self._runner is not None, "closed"
        self._steps.append(self._runner.launch(plan))

    def collect(self) -> StepResult:
        return self._steps.popleft().result()

    def close(self) -> None:
        self._runner = None
