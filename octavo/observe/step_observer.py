"""StepObserver: the protocol of everything that watches an engine's steps, and Observers, which notifies them.

A new observer is a class here or in a higher room that overrides what it wants to hear, and one line in engine/build.py."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING

import msgspec

from octavo.messages import Abort, GenerateRequest

if TYPE_CHECKING:  # API processes import from this room, and have no use for a scheduler
    from octavo.schedule.results import Committed, GrammarsReady, Planned, Removed
    from octavo.schedule.step_costs import StepCosts

log = logging.getLogger("octavo.engine")

DROPPED = "the observer %s failed and is dropped; serving goes on without it"


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """When a step was committed, and for how long it was computed."""

    now: float
    compute_seconds: float


class StepEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of one call of EngineLoop.step()."""

    planned: "Planned"  # what it planned; its result may still be on its way
    now: float  # when it committed last; where it committed nothing, when it had planned
    host_seconds: float  # spent on planning, submitting and committing, not on waiting for results
    num_in_flight: int  # steps that are submitted and not committed


class StepObserver:
    """Called on the stepping thread, after the fact. All methods are empty; one that is not overridden costs nothing.

    Times are readings of the engine's clock (CLOCK_MONOTONIC seconds), one for all observers of an event. What is passed belongs to
    the caller: observers read it, and copy what they keep. An observer that raises is logged and dropped; the engine goes on."""

    is_essential = False
    """Whether an exception here ends the engine, because it cannot run without this observer."""

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        """A request is in the queue, or (`awaits_grammar`) enters it once its grammar is ready."""

    def removed(self, abort: Abort, removed: "Removed", now: float) -> None:
        """An abort took out what it asked for."""

    def grammars_ready(self, ready: "GrammarsReady", now: float) -> None:
        """Grammars were compiled."""

    def prefixes_reset(self, now: float) -> None:
        """The prefix cache was emptied."""

    def costs_learned(self, costs: "StepCosts", now: float) -> None:
        """The scheduler was given new costs of steps."""

    def idle_limited(self, num_warm: int, now: float) -> None:
        """The cache was given a new limit of the pages that keep memory (PagePool.limit_touched)."""

    def prefixes_held(self, held: list[bytes], released: list[bytes], now: float) -> None:
        """The pages of some keys are evicted last from now on, those of others no more (KVCache.hold, KVCache.let_go)."""

    def load_began(self, ticket: int, held: list[bytes], count: int, now: float) -> None:
        """The cache has taken `count` pages, to be filled from a tier (KVCache.begin_load)."""

    def load_ended(self, ticket: int, count: int, keys: list[bytes], now: float) -> None:
        """The pages of a load are filled, as far as the keys go, and can be found (KVCache.end_load)."""

    def waited_for_load(self, request_id: str, since: float, num_tokens: int) -> None:
        """A request that waited for so many tokens from a tier arrives next."""

    def waited_for_adapter(self, request_id: str, since: float) -> None:
        """A request whose adapter is in memory, for which it waited since then, arrives next."""

    def began(self) -> None:
        """A step begins."""

    def rows_changed(self, planned: "Planned", now: float) -> None:
        """A plan was made by which requests got a row or lost it. Comes before planned()."""

    def planned(self, planned: "Planned", now: float) -> None:
        """A plan was made. It is submitted next, unless it is empty."""

    def committed(self, committed: "Committed", times: StepTimes) -> None:
        """A step's result was taken in; before its tokens are sent."""

    def stepped(self, end: StepEnd) -> None:
        """A step ends."""

    def closed(self) -> None:
        """The engine will step no more."""

    def dropped(self) -> None:
        """This observer has raised an exception, and is called no more. Its state may be incomplete: discard what others would read
        of it, and stop what would go on growing."""

    def needs_drain(self) -> bool:
        """Asked in every step, after its plan was submitted. True: the step is to end with nothing in flight."""
        return False


class Observers:
    """Notifies observers, in the order in which they were added, and reads the clock for all of them.

    A step is computed from when it was submitted, or the one before it was collected, until it is collected. That moment is exact
    where the loop had to wait for it; where the result was there already, the time counts up to when it was fetched.

    Every call has its own `try`, which costs nothing unless it catches; one function that makes all calls took 2 % of a step."""

    def __init__(self, observers: Iterable[StepObserver], clock: Callable[[], float] = time.monotonic) -> None:
        self._observers = list(observers)
        self._clock = clock
        self._started = self._collected = self._now = 0.0  # the last readings
        self._host_seconds = 0.0  # of this step, so far
        self._compute_seconds = 0.0  # of the step collected last
        self._submitted: deque[float] = deque()  # when the steps in flight were
        self._subscribe()

    def __iter__(self) -> Iterator[StepObserver]:
        return iter(self._observers)

    def add(self, observer: StepObserver) -> None:
        self._observers.append(observer)
        self._subscribe()

    def remove(self, observer: StepObserver) -> None:
        self._observers.remove(observer)
        self._subscribe()

    def _subscribe(self) -> None:
        self._on_arrived = self._overriding("arrived")
        self._on_removed = self._overriding("removed")
        self._on_grammars_ready = self._overriding("grammars_ready")
        self._on_prefixes_reset = self._overriding("prefixes_reset")
        self._on_costs_learned = self._overriding("costs_learned")
        self._on_idle_limited = self._overriding("idle_limited")
        self._on_prefixes_held = self._overriding("prefixes_held")
        self._on_load_began = self._overriding("load_began")
        self._on_load_ended = self._overriding("load_ended")
        self._on_waited_for_load = self._overriding("waited_for_load")
        self._on_waited_for_adapter = self._overriding("waited_for_adapter")
        self._on_began = self._overriding("began")
        self._on_rows_changed = self._overriding("rows_changed")
        self._on_planned = self._overriding("planned")
        self._on_committed = self._overriding("committed")
        self._on_stepped = self._overriding("stepped")
        self._on_closed = self._overriding("closed")
        self._on_needs_drain = self._overriding("needs_drain")

    def _overriding(self, event: str) -> list[MethodType]:
        default = getattr(StepObserver, event)
        return [getattr(each, event) for each in self._observers if getattr(type(each), event) is not default]

    def _drop(self, method: MethodType) -> None:
        """Go on without the observer whose method has raised, if the engine can. Called while the exception is handled."""
        observer = method.__self__
        assert isinstance(observer, StepObserver)
        if observer.is_essential:
            raise
        name = type(observer).__name__
        log.exception(DROPPED, name)
        self.remove(observer)
        try:
            observer.dropped()
        except Exception:
            log.exception("the observer %s failed again while it was dropped", name)

    # ── between steps ──

    def arrived(self, request: GenerateRequest, awaits_grammar: bool) -> None:
        now = self._clock()
        for notify in self._on_arrived:
            try:
                notify(request, now, awaits_grammar)
            except Exception:
                self._drop(notify)

    def removed(self, abort: Abort, removed: "Removed") -> None:
        now = self._clock()
        for notify in self._on_removed:
            try:
                notify(abort, removed, now)
            except Exception:
                self._drop(notify)

    def grammars_ready(self, ready: "GrammarsReady") -> None:
        now = self._clock()
        for notify in self._on_grammars_ready:
            try:
                notify(ready, now)
            except Exception:
                self._drop(notify)

    def prefixes_reset(self) -> None:
        now = self._clock()
        for notify in self._on_prefixes_reset:
            try:
                notify(now)
            except Exception:
                self._drop(notify)

    def costs_learned(self, costs: "StepCosts") -> None:
        now = self._clock()
        for notify in self._on_costs_learned:
            try:
                notify(costs, now)
            except Exception:
                self._drop(notify)

    def prefixes_held(self, held: list[bytes], released: list[bytes]) -> None:
        now = self._clock()
        for notify in self._on_prefixes_held:
            try:
                notify(held, released, now)
            except Exception:
                self._drop(notify)

    def load_began(self, ticket: int, held: list[bytes], count: int) -> None:
        now = self._clock()
        for notify in self._on_load_began:
            try:
                notify(ticket, held, count, now)
            except Exception:
                self._drop(notify)

    def load_ended(self, ticket: int, count: int, keys: list[bytes]) -> None:
        now = self._clock()
        for notify in self._on_load_ended:
            try:
                notify(ticket, count, keys, now)
            except Exception:
                self._drop(notify)

    def waited_for_load(self, request_id: str, since: float, num_tokens: int) -> None:
        for notify in self._on_waited_for_load:
            try:
                notify(request_id, since, num_tokens)
            except Exception:
                self._drop(notify)

    def waited_for_adapter(self, request_id: str, since: float) -> None:
        for notify in self._on_waited_for_adapter:
            try:
                notify(request_id, since)
            except Exception:
                self._drop(notify)

    def idle_limited(self, num_warm: int) -> None:
        now = self._clock()
        for notify in self._on_idle_limited:
            try:
                notify(num_warm, now)
            except Exception:
                self._drop(notify)

    def closed(self) -> None:
        for notify in self._on_closed:
            try:
                notify()
            except Exception:
                self._drop(notify)

    # ── the stages of a step ──

    def began(self) -> None:
        for notify in self._on_began:
            try:
                notify()
            except Exception:
                self._drop(notify)
        self._started = self._clock()

    def planned(self, planned: "Planned") -> None:
        now = self._now = self._clock()
        self._started = max(self._started, self._collected)  # a step with drafts is waited for before the plan
        self._host_seconds = now - self._started
        if not planned.is_empty:
            self._submitted.append(now)
        if planned.admitted or planned.returned or planned.plan.leaves:
            for notify in self._on_rows_changed:
                try:
                    notify(planned, now)
                except Exception:
                    self._drop(notify)
        for notify in self._on_planned:
            try:
                notify(planned, now)
            except Exception:
                self._drop(notify)

    def needs_drain(self) -> bool:
        needs_drain = False
        for asks in self._on_needs_drain:
            try:
                needs_drain |= asks()
            except Exception:
                self._drop(asks)
        return needs_drain

    def submitted(self) -> None:
        """The step is computed beside the host, which has spent this time on it. An executor that computes it before submit()
        returns spends the device's time there: that does not count."""
        self._host_seconds = self._clock() - self._started

    def collected(self) -> None:
        """The result of the oldest step in flight is there."""
        before, self._collected = self._collected, self._clock()
        self._compute_seconds = self._collected - max(self._submitted.popleft(), before)

    def committed(self, committed: "Committed") -> None:
        now = self._now = self._clock()
        self._host_seconds += now - self._collected
        times = StepTimes(now, self._compute_seconds)
        for notify in self._on_committed:
            try:
                notify(committed, times)
            except Exception:
                self._drop(notify)

    def stepped(self, planned: "Planned", num_in_flight: int) -> None:
        end = StepEnd(planned, self._now, self._host_seconds, num_in_flight)
        for notify in self._on_stepped:
            try:
                notify(end)
            except Exception:
                self._drop(notify)
