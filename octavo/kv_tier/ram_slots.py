"""RamSlots: which slot of a tier in memory holds which page. The memory itself is elsewhere. Any thread may call any method."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class RamSlots:
    """A slot is free, reserved (being filled), or holds a page. When slots run out, the page that was used longest ago goes, but never one
    that is being read."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # key → slot; the least recently used first
        self._readers: dict[int, int] = {}  # slot → reads in progress
        self._orphans: set[int] = set()  # slots whose page was deleted while it was read
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def num_found(self, keys: Sequence[bytes]) -> int:
        """How many of these pages are here, from the first on."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._slots), len(keys))

    def num_missing(self, keys: Sequence[bytes]) -> int:
        """How many are not, from the first on."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if key in self._slots), len(keys))

    def reserve(self, count: int) -> tuple[list[int], list[bytes]]:
        """Take up to `count` slots to be filled. → the slots, and the keys of pages that made room."""
        dropped: list[bytes] = []
        with self._lock:
            while len(self._free) < count:
                key = next((key for key, slot in self._slots.items() if slot not in self._readers), None)
                if key is None:
                    break
                self._free.append(self._slots.pop(key))
                dropped.append(key)
            self.num_evicted += len(dropped)
            return [self._free.pop() for _ in range(min(count, len(self._free)))], dropped

    def fill(self, keys: Sequence[bytes], slots: Sequence[int], are_right: Sequence[bool]) -> list[bytes]:
        """These reserved slots hold the pages of these keys, where they are right. The others are free again. → keys that are here now."""
        stored = []
        with self._lock:
            for key, slot, is_right in zip(keys, slots, are_right, strict=True):
                if is_right and key not in self._slots:
                    self._slots[key] = slot
                    stored.append(key)
                else:
                    self._free.append(slot)
        return stored

    def begin_read(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of these pages, from the first on as far as they are here. They stay until end_read()."""
        with self._lock:
            slots = []
            for key in keys:
                if (slot := self._slots.get(key)) is None:
                    break
                slots.append(slot)
                self._readers[slot] = self._readers.get(slot, 0) + 1
            for key in reversed(keys[: len(slots)]):  # the head of a prefix goes last
                self._slots.move_to_end(key)
            return slots

    def end_read(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self._readers[slot] -= 1
                if not self._readers[slot]:
                    del self._readers[slot]
                    if slot in self._orphans:
                        self._orphans.remove(slot)
                        self._free.append(slot)

    def clear(self) -> list[bytes]:
        """Delete all pages. → their keys."""
        with self._lock:
            keys = list(self._slots)
            for slot in self._slots.values():
                if slot in self._readers:
                    self._orphans.add(slot)
                else:
                    self._free.append(slot)
            self._slots.clear()
            return keys
