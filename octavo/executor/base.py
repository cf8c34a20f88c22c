"""Executor: the interface to what computes steps. Every submit is followed by one collect, in order."""

from collections.abc import Callable
from typing import Protocol

from octavo.messages import EngineReport, StepPlan, StepResult


class Executor(Protocol):
    overlap: bool
    """Whether the last submitted step runs in the background, so that the next one can be planned meanwhile."""

    def start(self) -> EngineReport:
        """Load the weights, then size and allocate the KV store. Raises ConfigError for what the user must change."""

    def submit(self, plan: StepPlan) -> None:
        """Start one step. At most one more than there are stages (EngineReport.num_stages) may be uncollected."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step and return its result. Raises EngineDead if a worker has ended."""

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        """Compile a grammar in the background, so that no step waits for it, and drop the grammars in `forgets`. `done` is called,
        from any thread, when it is ready or has failed."""

    def close(self) -> None:
        """Free everything; idempotent."""
