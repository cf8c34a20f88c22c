"""RecordingRing: a ring buffer with the last megabytes of a recording, in memory that the engine shares with its supervisor, so
that the last records of a killed engine are not lost.

The memory has no name in a file system. The engine's stepping thread writes at `head`; the recorder's thread moves `tail` after
it has written the bytes to a file. Positions count all bytes since the engine started."""

import mmap

from octavo.ipc.anonymous_memory import anonymous_memory

_WORDS = 2
_HEAD, _TAIL = range(_WORDS)
SIZE = 4 * 2**20
_WHOLE = 8 * _WORDS + SIZE
# Populated at once, so that the engine's memory does not grow while the ring fills for the first time.
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def shared_ring() -> int:
    """Return a descriptor of fresh memory that processes can inherit. The caller closes it."""
    return anonymous_memory("octavo-recorder", _WHOLE)


class RecordingRing:
    def __init__(self, fd: int = -1) -> None:
        """`fd`: from `shared_ring()`. −1: private memory."""
        self._memory = mmap.mmap(fd, _WHOLE, flags=_FLAGS if fd >= 0 else _FLAGS | mmap.MAP_ANONYMOUS)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("Q")
        self._head = 0  # the writer's own copy of `head`
        self._most = SIZE  # the position up to which the writer may write, by the last `tail` that it read

    def reset(self) -> None:
        """Empty the ring for a new engine's stream."""
        self._words[_HEAD] = self._words[_TAIL] = self._head = 0
        self._most = SIZE

    @property
    def head(self) -> int:
        return self._words[_HEAD]

    @property
    def tail(self) -> int:
        return self._words[_TAIL]

    @tail.setter
    def tail(self, position: int) -> None:
        self._words[_TAIL] = position

    def put(self, data: bytes, spare: int = 0) -> int:
        """Write `data` and return how many bytes are left. −1: no room for it and `spare` bytes more; nothing was written. `head`
        moves last, so all bytes below it are complete."""
        head, length = self._head, len(data)
        end = head + length
        if end > self._most - SIZE // 2:  # half full by the last known `tail`: read it again
            self._most = self._words[_TAIL] + SIZE
            if end + spare > self._most:
                return -1
        start = head % SIZE
        at = 8 * _WORDS + start
        if start + length <= SIZE:
            self._memory[at : at + length] = data
        else:
            cut = SIZE - start
            self._memory[at : at + cut] = data[:cut]
            self._memory[8 * _WORDS : 8 * _WORDS + length - cut] = data[cut:]
        self._words[_HEAD] = self._head = end
        return self._most - end

    def between(self, start: int, end: int) -> bytes:
        """Copy the bytes from position `start` up to `end`."""
        first, last = start % SIZE, end % SIZE
        if start >= end:
            return b""
        if first < last:
            return self._memory[8 * _WORDS + first : 8 * _WORDS + last]
        return self._memory[8 * _WORDS + first : 8 * _WORDS + SIZE] + self._memory[8 * _WORDS : 8 * _WORDS + last]

    def close(self) -> None:
        self._words.release()
        self._memory.close()
