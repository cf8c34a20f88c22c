"""Arena: places in one piece of memory."""

import bisect
import threading

ALIGNMENT = 256  # bytes


class Arena:
    """Places in one piece of memory. Free ones are kept in order and joined; the first that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()  # places are taken by the thread that loads, and given back by the one that steps
        self._starts, self._sizes = [0], {0: size}  # free places
        self._taken: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return sum(self._sizes.values())

    def take(self, num_bytes: int) -> int | None:
        """The start of a place, at a multiple of 256; None: there is none."""
        num_bytes = rounded(num_bytes)
        with self._lock:
            for at, start in enumerate(self._starts):
                size = self._sizes[start]
                if size < num_bytes:
                    continue
                del self._starts[at], self._sizes[start]
                if size > num_bytes:
                    self._starts.insert(at, start + num_bytes)
                    self._sizes[start + num_bytes] = size - num_bytes
                self._taken[start] = num_bytes
                return start
        return None

    def give_back(self, start: int) -> None:
        with self._lock:
            self._give_back(start, self._taken.pop(start))

    def _give_back(self, start: int, size: int) -> None:
        at = bisect.bisect(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + size:
            size += self._sizes.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] == start:
            self._sizes[self._starts[at - 1]] += size
        else:
            self._starts.insert(at, start)
            self._sizes[start] = size


def rounded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
