"""RecordingRing: the last few megabytes of a recording in memory that the engine shares with its supervisor, so that a killed engine's
last words are not lost. Knows nothing of records or files.

It has no name in any file system. The engine's stepping thread writes at `head`; whoever brings the bytes to a file moves
`tail`. Positions count all bytes since the engine started."""

import mmap
import os
import tempfile

_WORDS = 2
_HEAD, _TAIL = range(_WORDS)
SIZE = 4 * 2**20
_WHOLE = 8 * _WORDS + SIZE
# All of it is there from the beginning: an engine's memory does not grow while the box is written full for the first time.
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def shared_ring() -> int:
    """A descriptor of fresh memory that processes can inherit. Whoever asked closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("octavo-recorder")
        os.truncate(fd, _WHOLE)
        return fd
    with tempfile.TemporaryFile(prefix="octavo-") as file:
        file.write(bytes(_WHOLE))
        file.flush()
        return os.dup(file.fileno())


class RecordingRing:
    def __init__(self, fd: int = -1) -> None:
        """−1: shared with nobody."""
        self._memory = mmap.mmap(fd, _WHOLE, flags=_FLAGS if fd >= 0 else _FLAGS | mmap.MAP_ANONYMOUS)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("Q")
        self._head = 0  # the writer's own copy
        self._most = SIZE  # how far it may go, as far as it knows

    def reset(self) -> None:
        """A new engine's stream begins."""
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
        """→ how much room is left, or −1: there is none for it and `spare` bytes more, and nothing was written. `head` moves last:
        what lies below it is whole."""
        head, length = self._head, len(data)
        end = head + length
        if end > self._most - SIZE // 2:  # as far as is known, it is half full
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
        first, last = start % SIZE, end % SIZE
        if start >= end:
            return b""
        if first < last:
            return self._memory[8 * _WORDS + first : 8 * _WORDS + last]
        return self._memory[8 * _WORDS + first : 8 * _WORDS + SIZE] + self._memory[8 * _WORDS : 8 * _WORDS + last]

    def close(self) -> None:
        self._words.release()
        self._memory.close()
