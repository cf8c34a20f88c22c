"""AdapterTraffic: which adapters are in memory, which are being read, and which requests wait for one (decision 052).

A request with an adapter is held here, before the queue, until its adapter is in memory; the scheduler only ever sees requests that can
run. Adapters are read in the background, from the moment a request asks for them, so no step waits. They share a budget of bytes. An
adapter that no open request has may be dropped: the one that is cheapest to read again for the memory that it frees, and least used of
late (GreedyDual with frequencies).

Requests are let through in order of arrival, but for those whose adapter is in memory: they may overtake one that waits for memory,
at most MAX_OVERTAKEN times; then it is next as soon as running requests have ended."""

import itertools
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from octavo.errors import EngineDead, Overloaded
from octavo.executor.base import AdapterLoader
from octavo.messages import Abort, AdapterLoaded, AdapterRef, GenerateRequest
from octavo.observe.metrics.gauges import AdapterState
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed, Planned, Removed

MAX_HELD = 4096  # requests that may wait here
MAX_OVERTAKEN = 64
MAX_LOADS = 2  # that are out at one time

Key = tuple[str, str]  # path and stamp


class LetThrough(NamedTuple):
    request: GenerateRequest
    since: float  # when it began to wait


class Refused(NamedTuple):
    request: GenerateRequest
    why: str


@dataclass(slots=True)
class _Adapter:
    ref: AdapterRef
    num_bytes: int  # an estimate, until it is loaded
    id: str = ""  # a digest of its content; empty: it is not in memory
    is_loading: bool = False
    asked_at: float = 0.0
    load_seconds: float = 0.0
    num_uses: int = 0  # requests so far
    rank: float = 0.0  # the lowest is dropped first
    users: set[str] = field(default_factory=set)  # open requests
    calls: list[Callable[[str], None]] = field(default_factory=list)  # to be told "" or an error

    @property
    def key(self) -> Key:
        return self.ref.path, self.ref.stamp


@dataclass(slots=True)
class _Held:
    request: GenerateRequest
    adapter: _Adapter
    since: float
    num_overtaken: int = 0


@dataclass(slots=True)
class AdapterStats:
    """Since the start."""

    loads: int = 0
    load_seconds: float = 0.0
    failures: int = 0
    dropped: int = 0  # to make room for others
    waits: int = 0  # requests that waited
    wait_seconds: float = 0.0


class AdapterTraffic(StepObserver):
    is_essential = True  # without it, adapters would be dropped that requests have

    def __init__(
        self,
        scheduler: Scheduler,
        loader: AdapterLoader,
        budget: int,
        clock: Callable[[], float],
        max_used: int = 0,
        max_loaded: int = 0,
        itemsize: int = 4,
    ) -> None:
        """`budget`: bytes for all adapters in memory; `itemsize`: of a number. `max_used`: adapters that open requests
        may have at one time; `max_loaded`: that may be in memory; 0: as many as fit."""
        self._scheduler, self._loader, self._budget, self._clock = scheduler, loader, budget, clock
        self._max_used, self._max_loaded, self._itemsize = max_used, max_loaded, itemsize
        self._adapters: dict[Key, _Adapter] = {}  # in memory, being loaded, or waited for
        self._held: dict[str, _Held] = {}  # by request, in order of arrival
        self._of_request: dict[str, _Adapter] = {}  # of those that were let through and are not over
        self._ending: list[tuple[int, str]] = []  # (steps that were planned when it ended, request)
        self._num_committed = 0  # steps whose results are in: plans after them may still name a request that has ended
        self._age = 0.0  # rank of what was dropped last
        self._events: queue.SimpleQueue[tuple[Key, AdapterLoaded | str | EngineDead]] = queue.SimpleQueue()
        self._on_event: Callable[[], None] = lambda: None
        self.stats = AdapterStats()

    def on_event(self, wake: Callable[[], None]) -> None:
        """Let the loading thread wake an engine that sleeps."""
        self._on_event = wake

    # ── requests ──

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_events(self) -> bool:
        return not self._events.empty()

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def held(self, request_id: str) -> GenerateRequest | None:
        found = self._held.get(request_id)
        return None if found is None else found.request

    def add(self, request: GenerateRequest) -> list[LetThrough]:
        """Take in a request. → those that are to be added to the scheduler now. Raises Overloaded."""
        if request.adapter is None:
            params = request.params
            if params.adapter:  # only this class says which adapter a request has
                request = msgspec.structs.replace(request, params=msgspec.structs.replace(params, adapter=""))
            return [LetThrough(request, self._clock())]
        if len(self._held) >= MAX_HELD:
            raise Overloaded(f"{MAX_HELD} requests wait for adapters already: try again later", 5)
        self._held[request.id] = _Held(request, self._adapter(request.adapter), self._clock())
        return self._let_through()

    def load(self, ref: AdapterRef, done: Callable[[str], None]) -> None:
        """Read an adapter ahead of requests. `done` is called on the stepping thread: with "" when it is in memory, or with why not."""
        adapter = self._adapter(ref)
        if adapter.id:
            done("")
        else:
            adapter.calls.append(done)
            self._start_called(adapter)

    def _start_called(self, adapter: _Adapter) -> None:
        """Begin to load an adapter that was asked for ahead of requests, unless enough is being loaded: then take() begins it later."""
        if adapter.is_loading or self._is_loading_enough:
            return
        if not self._start(adapter):
            # Requests that run have all of the memory: its files are checked all the same, and they are read when memory is free.
            calls, adapter.calls = adapter.calls, []
            self._forget_if_unwanted(adapter)
            why = self._checked(adapter.ref)
            for call in calls:
                call(why)

    def _checked(self, ref: AdapterRef) -> str:
        try:
            self._loader.check_adapter(ref)
        except Exception as error:
            return str(error)
        return ""

    def drop(self, abort: Abort) -> bool:
        """Whether an aborted request was held here: then that is all there is to do. Of one choice of several nothing is known yet: a
        held request has no output."""
        held = self._held.get(abort.request_id)
        if held is None:
            return False
        if abort.index < 0 or held.request.params.n == 1:
            del self._held[abort.request_id]
            self._forget_if_unwanted(held.adapter)
        return True

    def take(self, seconds: float = 0.0) -> tuple[list[LetThrough], list[Refused]]:
        """Take in what was loaded; wait for it at most so long. Raises EngineDead if a rank has ended."""
        refused: list[Refused] = []
        try:
            key, loaded = self._events.get(seconds > 0, seconds)
            while True:
                if isinstance(loaded, EngineDead):
                    raise loaded
                refused += self._loaded(key, loaded)
                key, loaded = self._events.get_nowait()
        except queue.Empty:
            pass
        self._end()
        for adapter in [each for each in self._adapters.values() if each.calls and not each.is_loading and not each.id]:
            self._start_called(adapter)
        return (self._let_through() if self._held else []), refused

    def _adapter(self, ref: AdapterRef) -> _Adapter:
        key = (ref.path, ref.stamp)
        found = self._adapters.get(key)
        if found is None:
            found = self._adapters[key] = _Adapter(ref, ref.num_weights * self._itemsize)
        return found

    def _let_through(self) -> list[LetThrough]:
        """Those of the held requests that can run now. Begins to load what others need."""
        released: list[LetThrough] = []
        blocked: _Held | None = None  # the first that waits for memory, or for others to end
        for held in list(self._held.values()):
            adapter = held.adapter
            if blocked is not None and blocked.num_overtaken >= MAX_OVERTAKEN:
                break
            if adapter.id and self._may_use(adapter):
                if blocked is not None:
                    blocked.num_overtaken += 1
                released.append(self._use(held))
            elif not adapter.id and (adapter.is_loading or (blocked is None and self._start(adapter))):
                pass  # it is on its way
            elif blocked is None:
                blocked = held
        return released

    def _may_use(self, adapter: _Adapter) -> bool:
        return bool(adapter.users) or not self._max_used or self._num_used < self._max_used

    @property
    def _num_used(self) -> int:
        return sum(bool(adapter.users) for adapter in self._adapters.values())

    def _use(self, held: _Held) -> LetThrough:
        request, adapter = held.request, held.adapter
        del self._held[request.id]
        adapter.users.add(request.id)
        adapter.num_uses += 1
        self._touch(adapter)
        self._of_request[request.id] = adapter
        self.stats.waits += 1
        self.stats.wait_seconds += self._clock() - held.since
        params = msgspec.structs.replace(request.params, adapter=adapter.id)
        return LetThrough(msgspec.structs.replace(request, params=params), held.since)

    # ── memory ──

    def _touch(self, adapter: _Adapter) -> None:
        adapter.rank = self._age + adapter.num_uses * adapter.load_seconds / max(adapter.num_bytes, 1)

    def _start(self, adapter: _Adapter) -> bool:
        """Begin to load it. False: there is no room, or enough is being loaded."""
        if adapter.is_loading:
            return True
        if self._is_loading_enough or not self._make_room(adapter):
            return False
        adapter.is_loading, adapter.asked_at = True, self._clock()
        key = adapter.key
        self._loader.load_adapter(adapter.ref, lambda loaded: self._put(key, loaded))
        return True

    @property
    def _is_loading_enough(self) -> bool:
        return sum(other.is_loading for other in self._adapters.values()) >= MAX_LOADS

    def _put(self, key: Key, loaded: AdapterLoaded | str | EngineDead) -> None:
        """Called by the loading thread."""
        self._events.put((key, loaded))
        self._on_event()

    def _make_room(self, wanted: _Adapter) -> bool:
        """Drop adapters until this one fits. False: those that are left are in use, or being loaded."""
        held = [other for other in self._adapters.values() if (other.id or other.is_loading) and other is not wanted]
        num_bytes, count = sum(other.num_bytes for other in held) + wanted.num_bytes, len(held) + 1
        dropped: list[_Adapter] = []
        # Those that earlier requests wait for are kept; what later ones want may go, or two requests could wait for each other.
        ahead = itertools.takewhile(lambda waiting: waiting.adapter is not wanted, self._held.values())
        kept = {waiting.adapter.id for waiting in ahead}
        spare = [other for other in held if other.id and not other.users and other.id not in kept]
        for other in sorted(spare, key=lambda one: one.rank):
            if num_bytes <= self._budget and not (self._max_loaded and count > self._max_loaded):
                break
            dropped.append(other)
            num_bytes, count = num_bytes - other.num_bytes, count - 1
        # Alone it may try, whatever was estimated: its real size decides.
        if len(dropped) < len(held) and (num_bytes > self._budget or (self._max_loaded and count > self._max_loaded)):
            return False
        ids = [other.id for other in dropped]  # others may have the same content: loads are counted
        for other in dropped:
            self._age = max(self._age, other.rank)
            other.id = ""
            self._forget_if_unwanted(other)
        if ids:
            self._loader.forget_adapters(ids)
        self.stats.dropped += len(dropped)
        return True

    def _loaded(self, key: Key, loaded: AdapterLoaded | str) -> list[Refused]:
        adapter = self._adapters.get(key)
        if adapter is None:
            return []
        adapter.is_loading = False
        if isinstance(loaded, AdapterLoaded) and not loaded.id:
            return self._try_again(adapter)
        calls, adapter.calls = adapter.calls, []
        if isinstance(loaded, str):
            self.stats.failures += 1
            return self._fail(adapter, loaded, calls)
        adapter.load_seconds = self._clock() - adapter.asked_at
        self.stats.loads += 1
        self.stats.load_seconds += adapter.load_seconds
        adapter.id, adapter.num_bytes = loaded.id, loaded.num_bytes
        self._touch(adapter)
        if loaded.num_bytes > self._budget:
            adapter.id = ""
            self._loader.forget_adapters([loaded.id])
            why = f"adapter {adapter.ref.name} takes {loaded.num_bytes} bytes; all may take {self._budget} (--lora-memory)"
            return self._fail(adapter, why, calls)
        if not self._make_room(adapter):  # it is larger than was estimated, and the others are in use
            adapter.id = ""
            self._loader.forget_adapters([loaded.id])
        for call in calls:
            call("")
        self._forget_if_unwanted(adapter)
        return []

    def _try_again(self, adapter: _Adapter) -> list[Refused]:
        """What is free lies in pieces that are too small for it: one more adapter must go before it is loaded again."""
        others = [other.num_bytes for other in self._adapters.values() if other.id or other.is_loading]
        calls = adapter.calls
        if not others:
            adapter.calls = []
            why = f"adapter {adapter.ref.name} does not fit into the memory for adapters, {self._budget} bytes (--lora-memory)"
            return self._fail(adapter, why, calls)
        adapter.num_bytes = max(adapter.num_bytes, self._budget - sum(others) + 1)
        if not self._start(adapter):  # those that are left are in use: it is loaded when they are not
            adapter.calls = []
            for call in calls:
                call("")
            self._forget_if_unwanted(adapter)
        return []

    def _fail(self, adapter: _Adapter, why: str, calls: list[Callable[[str], None]]) -> list[Refused]:
        refused = [Refused(held.request, why) for held in self._held.values() if held.adapter is adapter]
        for one in refused:
            del self._held[one.request.id]
        del self._adapters[adapter.key]
        for call in calls:
            call(why)
        return refused

    def _forget_if_unwanted(self, adapter: _Adapter) -> None:
        """Drop the entry of an adapter that is not in memory and that no request waits for any more."""
        if (
            not adapter.id
            and not adapter.is_loading
            and not adapter.calls
            and all(held.adapter is not adapter for held in self._held.values())
        ):
            self._adapters.pop(adapter.key, None)

    # ── ends of requests ──

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self._note_ended([request.id for request in removed.ended])

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._num_committed = committed.plan.step + 1
        if committed.ended:
            self._note_ended([request.id for request in committed.ended])

    def planned(self, planned: Planned, now: float) -> None:
        if self._ending:
            self._end()

    def _note_ended(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._of_request and not self._scheduler.has(request_id):
                self._ending.append((self._scheduler.num_steps, request_id))

    def _end(self) -> None:
        """Give up adapters of requests that are over, once no plan in flight names them."""
        left: list[tuple[int, str]] = []
        for num_planned, request_id in self._ending:
            if self._num_committed < num_planned:
                left.append((num_planned, request_id))
                continue
            adapter = self._of_request.pop(request_id, None)
            if adapter is not None:
                adapter.users.discard(request_id)
        self._ending = left

    # ── what it looks like ──

    def state(self) -> AdapterState:
        """For metrics."""
        loaded = [adapter for adapter in self._adapters.values() if adapter.id]
        stats = self.stats
        rows = self._scheduler.rows
        running, waiting = set[str](), {held.adapter.ref.name for held in self._held.values()}
        for request_id, adapter in self._of_request.items():  # one that is over has no choices
            for choice in self._scheduler.choices(request_id):
                (waiting if rows.waits(choice) else running).add(adapter.ref.name)
        return AdapterState(
            tuple(sorted(running)),
            tuple(sorted(waiting)),
            self._max_used,
            len(loaded),
            sum(adapter.num_bytes for adapter in loaded),
            self._budget,
            stats.loads,
            stats.load_seconds,
            stats.waits,
            stats.wait_seconds,
            stats.dropped,
            stats.failures,
        )
