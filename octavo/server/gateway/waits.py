"""Waits: requests that wait for their model to be loaded, and those that have waited, as part of their journeys."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from octavo.observe.journeys.journey import DIGITS, Journey
from octavo.observe.journeys.stages import Stage
from octavo.server.state.owners import Viewer

MAX_KEPT = 4096  # requests that have waited


class Wait(msgspec.Struct):
    """One request's time before its model was loaded."""

    id: str
    owner: bytes
    handler: str
    received_at: float  # Unix time
    model: str
    seconds: float = 0.0  # in all, once it is over


class Waits:
    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._num_open: Counter[bytes] = Counter()  # by owner
        self._over: OrderedDict[tuple[bytes | None, str], Wait] = OrderedDict()  # None: the latest of any key

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """While a request waits. The caller sets `seconds` if it has got its model."""
        self._open[id(wait)] = wait
        self._num_open[wait.owner] += 1
        try:
            yield
        finally:
            del self._open[id(wait)]
            self._num_open[wait.owner] -= 1
            if not self._num_open[wait.owner]:
                del self._num_open[wait.owner]
            if wait.seconds:
                for owner in (wait.owner, None):
                    self._over[owner, wait.id] = wait
                while len(self._over) > 2 * MAX_KEPT:
                    self._over.popitem(last=False)

    def num_of(self, owner: bytes) -> int:
        """Requests of a key that wait."""
        return self._num_open[owner]

    def journeys(self, viewer: Viewer, now: float, state_of: Mapping[str, str], request_id: str = "") -> list[Journey]:
        """Of requests that wait. `now`: Unix time; `state_of`: the state of each model."""
        return [
            Journey(
                each.id, "waiting", [], each.handler, each.received_at, round(now - each.received_at, DIGITS),
                [_stage(now - each.received_at)], -1, note=f"model {each.model} is {state_of[each.model]}",
            )
            for each in self._open.values()
            if viewer.may_see(each.owner) and request_id in ("", each.id)
        ]  # fmt: skip

    def joined(self, listed: bytes, viewer: Viewer, model: str) -> list[tuple[float, bytes]]:
        """A server's list of journeys: when each began, and its text with the time that it waited for the model before."""
        found = []
        for raw in _list.decode(listed).data:
            head = _head.decode(raw)
            wait = self._over.get((viewer.only, head.id)) if self._over else None
            if wait is None or wait.model != model:
                found.append((head.received_at, bytes(raw)))
            else:
                found.append((wait.received_at, _with_wait(raw, wait)))
        return found

    def join(self, journey: bytes, viewer: Viewer, model: str) -> bytes:
        wait = self._over.get((viewer.only, _head.decode(journey).id))
        return journey if wait is None or wait.model != model else _with_wait(journey, wait)


class _Head(msgspec.Struct):
    id: str
    received_at: float


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


_head, _list = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_List)
_journey = msgspec.json.Decoder(Journey)


def _with_wait(text: bytes | msgspec.Raw, found: Wait) -> bytes:
    journey, late = _journey.decode(text), found.seconds
    stages = [_stage(late), *(_later(stage, late) for stage in journey.stages)]
    legs = [msgspec.structs.replace(leg, stages=[_later(stage, late) for stage in leg.stages]) for leg in journey.legs]
    first = journey.first_byte_seconds
    changed = msgspec.structs.replace(
        journey,
        received_at=found.received_at,
        seconds=round(journey.seconds + late, DIGITS),
        first_byte_seconds=None if first is None else round(first + late, DIGITS),
        stages=stages,
        legs=legs,
    )
    return msgspec.json.encode(changed)


def _stage(seconds: float) -> Stage:
    return Stage("model", 0.0, round(seconds, DIGITS))


def _later(stage: Stage, seconds: float) -> Stage:
    return msgspec.structs.replace(
        stage, start=round(stage.start + seconds, DIGITS), end=round(stage.end + seconds, DIGITS)
    )
