"""LocalExecutor: the one rank lives in this process; a step is computed when it is submitted.
Knows nothing of requests or of how a step is computed."""

from collections import deque

from octavo.config import Config
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.weights.source import ModelSource
from octavo.worker.memory import settle
from octavo.worker.runner import Runner


class LocalExecutor:
    overlap = False

    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        self._runner: Runner | None = Runner(config, source)
        self._results: deque[StepResult] = deque()

    def start(self) -> EngineReport:
        assert self._runner is not None, "closed"
        report = settle(self._config.cache, [self._runner.load()])
        self._runner.allocate(report.num_pages, report.num_host_pages)
        return report

    def submit(self, plan: StepPlan) -> None:
        assert self._runner is not None, "closed"
        self._results.append(self._runner.run(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._runner = None
