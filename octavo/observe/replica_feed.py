"""ReplicaFeed: turns what steps return into the events that routers follow: pages stored and evicted, and the work that waits.

It is added to a replica's observers when a router listens; without one the cache logs nothing."""

from collections.abc import Iterable, Sequence

from octavo.cache.pool import ChangeLog
from octavo.messages import PAGE_ID_BYTES, Abort, GenerateRequest, PageEvents, PageSnapshot, ReplicaLoad
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule import Scheduler
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, Planned, Removed, Returned

DECAY = 0.99
"""Weight of a step in the measured pace after each further step: about the last hundred count."""


MAX_ADAPTERS = 10_000
"""Whose ids are kept for routers that begin to listen."""


class StepPace:
    """Seconds of a step as a constant plus so much per token: least squares over the last steps."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        self._weight = self._weight * DECAY + 1.0
        self._x = self._x * DECAY + num_tokens
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + num_tokens * num_tokens
        self._xy = self._xy * DECAY + num_tokens * seconds

    def note_all(self, num_tokens: int, seconds: Iterable[float]) -> None:
        """The same as note() for each, to the last bit: a simulation with jumps must route as one without."""
        weight, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        square = num_tokens * num_tokens
        for each in seconds:
            weight = weight * DECAY + 1.0
            x = x * DECAY + num_tokens
            y = y * DECAY + each
            xx = xx * DECAY + square
            xy = xy * DECAY + num_tokens * each
        self._weight, self._x, self._y, self._xx, self._xy = weight, x, y, xx, xy

    def seconds_per_token(self, step_tokens: int) -> float:
        """In a step of `step_tokens`. 0: nothing was measured."""
        if not self._x:
            return 0.0
        spread = self._weight * self._xx - self._x * self._x
        each = 0.0
        if spread > 1e-6 * self._weight * self._xx:  # else all steps were alike, and only their mean is known
            each = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
        constant = max(0.0, self._y - each * self._x) / self._weight
        if not each:
            return self._y / self._x
        return each + constant / step_tokens


class ReplicaFeed(StepObserver):
    """take() and snapshot() are called on the stepping thread, between two steps."""

    def __init__(self, scheduler: Scheduler, replica: int, epoch: int) -> None:
        self._scheduler, self._replica, self._epoch = scheduler, replica, epoch
        self._number = 0
        self._changes = ChangeLog()
        self._pace = StepPace()
        self._waiting: dict[tuple[str, int], int] = {}  # (request, choice) in the queue → tokens it is to compute
        self._num_waiting_tokens = 0
        self._num_taken: dict[int, int] = {}
        self._adapters: dict[str, str] = {}  # AdapterRef.key → id; of the last MAX_ADAPTERS
        self._new_adapters: dict[str, str] = {}  # since the last event
        scheduler.cache.watch_pages()
        for key in scheduler.cache.findable_keys():
            self._changes.store(key)
        for request in scheduler.requests():
            if request.row < 0:
                self._queue(request.id, request.index, len(request.tokens) - request.computed)

    # ── what it hears ──

    def received(self, origin: int) -> None:
        """A request came from an API process: also one that is refused, or that ends before it is queued, because a router counts the work of
        all that it has sent until they are taken."""
        self._num_taken[origin] = self._num_taken.get(origin, 0) + 1

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        if request.adapter is not None and request.adapter.key not in self._adapters:
            key, its_id = request.adapter.key, request.params.adapter
            self._adapters[key] = self._new_adapters[key] = its_id
            if len(self._adapters) > MAX_ADAPTERS:
                del self._adapters[next(iter(self._adapters))]
        expected = min(request.num_expected, len(request.prompt_ids) - 1)
        if not any(request.begun):
            self._queue(request.id, 0, len(request.prompt_ids) - max(0, expected))
            return
        for index, tokens in enumerate(request.begun):
            if tokens is not None:
                self._queue(request.id, index, len(request.prompt_ids) + len(tokens))

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self._ended(removed.ended)
        self._returned(removed.returned)

    def prefixes_reset(self, now: float) -> None:
        self._changes.add(self._scheduler.cache.take_changes())

    def rows_changed(self, planned: Planned, now: float) -> None:
        for request in planned.admitted:
            self._leave_queue(request)
        self._returned(planned.returned)

    def planned(self, planned: Planned, now: float) -> None:
        self._changes.add(planned.pages)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._changes.add(committed.pages)
        self._pace.note(committed.num_tokens, times.compute_seconds)
        self._ended(committed.ended)

    def jumped(self, num_tokens: int, seconds: Sequence[float]) -> None:
        """A simulation took steps of `num_tokens` each at once (schedule/steady.py): these took so long."""
        self._changes.add(self._scheduler.cache.take_changes())
        self._pace.note_all(num_tokens, seconds)

    def closed(self) -> None:
        self._scheduler.cache.ignore_pages()

    def dropped(self) -> None:
        """Routers see from the missing events that this replica's pages are unknown."""
        self._scheduler.cache.ignore_pages()

    # ── what it says ──

    def take(self) -> PageEvents:
        """Everything since the last event."""
        stored, evicted = self._changes.take()
        self._number += 1
        adapters, self._new_adapters = self._new_adapters, {}
        return PageEvents(self._replica, self._epoch, self._number, _ids(stored), _ids(evicted), self.load(), adapters)

    def snapshot(self) -> PageSnapshot:
        """All pages as of the last event, for a router that has lost events or has just begun to listen. What has changed since is
        in the next event, which goes to all routers."""
        held = dict.fromkeys(self._scheduler.cache.findable_keys())
        untold = self._changes.take()
        for key in untold.stored:
            held.pop(key, None)
            self._changes.store(key)
        for key in untold.evicted:
            held[key] = None
            self._changes.evict(key)
        return PageSnapshot(self._replica, self._epoch, self._number, _ids(held), self.load(), dict(self._adapters))

    def load(self) -> ReplicaLoad:
        scheduler = self._scheduler
        running = sum(max(0, len(each.tokens) - each.computed - 1) for each in scheduler.running)
        return ReplicaLoad(
            self._num_waiting_tokens + running,
            self._pace.seconds_per_token(scheduler.max_step_tokens),
            len(scheduler.running) + scheduler.num_waiting,
            dict(self._num_taken),
        )

    # ── helpers ──

    def _queue(self, request_id: str, index: int, num_tokens: int) -> None:
        name = (request_id, index)
        self._num_waiting_tokens += num_tokens - self._waiting.get(name, 0)
        self._waiting[name] = num_tokens

    def _leave_queue(self, request: Request) -> None:
        self._num_waiting_tokens -= self._waiting.pop((request.id, request.index), 0)

    def _ended(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._leave_queue(request)

    def _returned(self, returned: Iterable[Returned]) -> None:
        for each in returned:
            request = each.request
            self._queue(request.id, request.index, max(1, len(request.tokens) - request.computed))


def _ids(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:PAGE_ID_BYTES] for key in keys])
