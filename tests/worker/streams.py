"""A device whose two streams run late and in any order that their events allow, for tests of what must wait for what.
It defers writes to any tensor while it is on."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.device import Device, Event


class LateEvent(Event):
    """Marks a point of the stream that was current; an unrecorded one marks the beginning of time."""

    def __init__(self, device: "LateDevice") -> None:
        super().__init__()
        self._device = device
        self.is_heard = True  # False: nobody waits for it, a planted fault
        self._mark: object | None = None

    def record(self) -> None:
        mark = self._mark = object()
        self._device.queue(lambda: self._device.reached.add(mark))

    def hold(self) -> None:
        mark = self._mark
        if mark is not None and self.is_heard:
            self._device.queue(lambda: None, after=mark)

    def wait(self) -> None:
        raise AssertionError("the host waited")


class LateDevice(Device, TorchDispatchMode):
    """Entered with `with`: writes are queued on the current stream; run() carries them out, interleaved at random."""

    def __init__(self, seed: int) -> None:
        Device.__init__(self, "cpu")
        TorchDispatchMode.__init__(self)
        self.reached: set[object] = set()
        self._random = random.Random(seed)
        self._streams: list[list[tuple[object | None, Callable[[], object]]]] = [[], []]
        self._current = 0

    def event(self) -> Event:
        return LateEvent(self)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self._current = 1
        yield
        self._current = 0

    def queue(self, work: Callable[[], object], after: object | None = None) -> None:
        self._streams[self._current].append((after, work))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.queue(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if func is torch.ops.aten.index_select.default:  # it has the right shape, and not yet the right content
            self.queue(lambda: result.copy_(func(*args)))
        return result

    def run(self) -> None:
        while any(self._streams):
            ready = [s for s in self._streams if s and (s[0][0] is None or s[0][0] in self.reached)]
            assert ready, "the streams wait for each other"
            stream = self._random.choice(ready)
            # Long stretches of one stream, too: what overtakes by one step only is rarely seen.
            for _ in range(self._random.choice((1, 1, 5, 50))):
                if stream and (stream[0][0] is None or stream[0][0] in self.reached):
                    stream.pop(0)[1]()
