"""Executor: the interface to what computes steps. Every submit is followed by one collect, in order."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from octavo.config import KVTiers
from octavo.errors import EngineDead
from octavo.messages import AdapterLoaded, AdapterRef, EngineReport, StepPlan, StepResult
from octavo.messages.tiers import Level, TierCounts, TierEvent


class TierMover(Protocol):
    """Moves KV pages to a tier and back, beside the steps."""

    events: SimpleQueue[TierEvent]
    on_event: Callable[[], None]
    """Called by any thread after an event was put."""

    def load(self, ticket: int, keys: list[bytes], pages: list[int]) -> None:
        """Read the pages of these keys into `pages`, which nothing else uses until a Loaded event tells how many are right."""

    num_ram_pages: int
    """Pages that fit into the level `ram`; 0: there is none."""
    has_disk: bool

    def store(self, keys: list[bytes], pages: list[int], level: Level = "disk") -> None:
        """Copy these pages, and ask for approval by a Copied event; IN_RAM in place of a page: its key is in memory, and is copied from
        there. One store at a time."""

    def approve(self, are_right: list[bool]) -> None:
        """Which of the copied pages held what they were to hold until now: those are stored."""

    def delete_all(self) -> None:
        """Delete all pages of this layout."""

    def counts(self) -> TierCounts: ...

    def close(self) -> None:
        """Stop; idempotent."""


@runtime_checkable
class AdapterLoader(Protocol):
    """Holds adapters in memory, beside the steps: an executor that has them (--enable-lora)."""

    def adapter_itemsize(self) -> int:
        """Bytes of a number of an adapter in memory."""

    def check_adapter(self, ref: AdapterRef) -> int:
        """Check an adapter's files against the model, without its numbers. → bytes that it will take. Raises ConfigError."""

    def load_adapter(self, ref: AdapterRef, done: Callable[[AdapterLoaded | str | EngineDead], None]) -> None:
        """Read an adapter into memory in the background, so that no step waits for it. `done` is called, from any thread, when it is
        there, or with why it is not: EngineDead, if a rank has ended."""

    def forget_adapters(self, ids: list[str]) -> None:
        """Free adapters, once for each time that they were loaded. No request that is in a plan has one of them."""


@runtime_checkable
class Sleeper(Protocol):
    """An executor that can give memory back while nothing is computed, and keeps the weights."""

    def sleep(self, pages: list[int], keeps_pages: bool, moved: Callable[[], None]) -> None:
        """Give back the memory of these blank pages, and on a GPU that of the weights, which go to pinned memory, and of all pages unless
        `keeps_pages`: some hold what is needed. Every step was collected, and none comes before wake_up(). `moved`: called now and then, by any
        thread, as long as weights are being moved."""

    def wake_up(self, moved: Callable[[], None]) -> None:
        """Be ready for steps. Pages that were given back are zero."""


class Executor(Protocol):
    overlap: bool
    """Whether the last submitted step runs in the background, so that the next one can be planned meanwhile."""

    def start(self) -> EngineReport:
        """Load the weights, then size and allocate the KV store. Raises ConfigError for what the user must change."""

    def submit(self, plan: StepPlan) -> None:
        """Start one step. At most one more than there are stages (EngineReport.num_stages) may be uncollected."""

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step and return its result. Raises EngineDead if a worker has ended."""

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        """Compile a grammar (empty: none) in the background, so that no step waits for it, and drop the grammars in `forgets`.
        `done` is called, from any thread, when it is ready or has failed, with the bytes that it takes on one rank."""

    def give_back(self, pages: list[int]) -> None:
        """Give the memory of blank pages back to the system, where this executor can: they are zero when they are used again."""

    def open_tier(self, tiers: KVTiers, layout: str) -> TierMover:
        """Open tiers for pages of this layout. Raises ConfigError where this executor has none."""

    def close(self) -> None:
        """Free everything; idempotent."""
