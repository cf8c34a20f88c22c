"""Stages of a pipeline in one process, on one device: an executor whose ranks hand their hidden states on through a queue."""

from collections import deque
from collections.abc import Callable

import torch

from octavo.config import Config
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.parallel import Group, Links, Ranks
from octavo.weights.sources.source import ModelSource
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import settle
from octavo.worker.runner import Runner
from octavo.worker.step import LaunchedStep


class QueueLinks(Links):
    def __init__(self, before: deque[torch.Tensor], after: deque[torch.Tensor]) -> None:
        self._before, self._after = before, after

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.copy_(self._before.popleft())

    def send(self, hidden: torch.Tensor) -> None:
        self._after.append(hidden)


class StagedExecutor:
    overlap = True

    def __init__(self, config: Config, source: ModelSource, num_stages: int) -> None:
        self._config = config
        queues: list[deque[torch.Tensor]] = [deque() for _ in range(num_stages + 1)]
        self._loaders = [
            Loader(
                config,
                source,
                Ranks(Group.single(), QueueLinks(queues[stage], queues[stage + 1]), stage, num_stages, Group.single()),
            )
            for stage in range(num_stages)
        ]
        self.runners: list[Runner] = []
        self._steps: deque[LaunchedStep] = deque()

    def start(self) -> EngineReport:
        report = settle(self._config.cache, [loader.load() for loader in self._loaders])
        self.runners = [loader.allocate(report.num_pages, report.num_host_pages)[0] for loader in self._loaders]
        return report

    def submit(self, plan: StepPlan) -> None:
        self._steps.append([runner.launch(plan) for runner in self.runners][-1])

    def collect(self) -> StepResult:
        return self._steps.popleft().result()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        self.runners[-1].rows.sampling.grammars.prepare(grammar, forgets, done)

    def close(self) -> None:
        for runner in self.runners:
            runner.rows.sampling.grammars.close()
