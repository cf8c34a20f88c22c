"""HostCopies: adapters in pinned host memory, in the form of the device, from which they are copied there again."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.arena import Arena


class Form(NamedTuple):
    """How an adapter's matrices lie in one piece of memory."""

    table: NDArray[np.int64]  # as on the device, with starts in place of addresses
    pieces: NDArray[np.int64]  # [matrices, 2]: starts in ascending order, and bytes
    kinds: int  # of the sites that it changes
    num_bytes: int  # of the memory

    @property
    def is_used(self) -> NDArray[np.bool_]:
        """Which entries of the table are parts."""
        return self.table[..., 2] > 0


class HostRoom(NamedTuple):
    memory: Tensor  # uint8
    start: int


class HostCopy(NamedTuple):
    memory: Tensor  # uint8
    start: int
    form: Form


class HostCopies:
    """Not for several threads at a time. A copy that was not read for the longest time makes room for others."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._arena = memory, Arena(len(memory))
        self._copies: dict[str, HostCopy] = {}  # the one that was read last is last
        self._kept: set[int] = set()  # their starts

    def take(self, num_bytes: int) -> HostRoom | None:
        """Room, for which copies are dropped; None: there is not as much memory."""
        if num_bytes > len(self._memory):
            return None
        while (start := self._arena.take(num_bytes)) is None:
            if not self._copies:
                return None
            self._drop(next(iter(self._copies)))
        return HostRoom(self._memory[start : start + num_bytes], start)

    def free(self, room: HostRoom) -> None:
        """Unless what is there was kept."""
        if room.start not in self._kept:
            self._arena.give_back(room.start)

    def keep(self, name: str, room: HostRoom, form: Form) -> HostCopy:
        """Keep what is in this room, in place of an earlier copy of the same adapter."""
        if name in self._copies:
            self._drop(name)
        self._kept.add(room.start)
        copy = self._copies[name] = HostCopy(room.memory, room.start, form)
        return copy

    def _drop(self, name: str) -> None:
        start = self._copies.pop(name).start
        self._kept.remove(start)
        self._arena.give_back(start)

    def get(self, name: str) -> HostCopy | None:
        copy = self._copies.pop(name, None)
        if copy is not None:
            self._copies[name] = copy
        return copy

    def has(self, memory: Tensor) -> bool:
        """Whether this is a part of the pinned memory."""
        start = memory.data_ptr() - self._memory.data_ptr()
        return 0 <= start < len(self._memory)
