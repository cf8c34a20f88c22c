"""Executor: where a step is carried out. Five verbs; submit and collect are called in pairs, in order.
Knows nothing of requests or of torch."""

from collections.abc import Callable
from typing import Protocol

from octavo.messages import EngineReport, StepPlan, StepResult


class Executor(Protocol):
    overlap: bool
    """Whether the last step submitted is computed beside us, so that the next plan can be made meanwhile."""

    def start(self) -> EngineReport:
        """Load the weights, size and allocate the KV store. Raises ConfigError for what a person must change."""

    def submit(self, plan: StepPlan) -> None:
        """Hand over one step. At most two may be uncollected."""

    def collect(self) -> StepResult:
        """The oldest uncollected step's tokens. Raises EngineDead when a worker is lost."""

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[], None]) -> None:
        """Make a grammar ready beside the steps, so that none waits for it, and forget others. `done` is called when it is, or
        never will be, by whichever thread."""

    def close(self) -> None:
        """Free everything; idempotent."""
