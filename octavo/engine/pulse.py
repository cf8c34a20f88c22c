"""Pulse: a few numbers in memory that the engine shares with its supervisor and the API processes: does it turn, and with whom.
Knows nothing of what is done about it.

It has no name in any file system, so nothing of it stays behind, and reading it asks nothing of an engine that may hang. Every
word has one writer. The engine writes a few words in each turn of its loop, and a row's occupant when that changes."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterable

_WORDS = 32
_PID, _BEAT, _IS_STEPPING, _LAST_STEP, _NUM_STEPS, _NUM_RUNNING, _NUM_WAITING, _STALLED = range(8)
_RESTARTS = 16  # the first of the words that outlive an engine
CAUSES = (
    ("engine", "killed"),  # by a signal from elsewhere
    ("engine", "failed"),  # it ended itself
    ("engine", "hung"),  # the supervisor ended it
    ("engine", "start"),  # it did not come up
    ("api", "killed"),
    ("api", "failed"),
    ("api", "hung"),
)
"""Which process was started again, and why."""
_SLOT = 64  # bytes for a row's occupant: how long its id is, then the id, cut if need be
_MAX_ROWS = 4096  # occupants of rows beyond these are not told
_BEATS = 8 * _WORDS + _SLOT * _MAX_ROWS  # where API processes write, a word each
_MAX_SERVERS = 1024  # those beyond these are not watched
_SIZE = _BEATS + 8 * _MAX_SERVERS


def shared_memory() -> int:
    """A descriptor of fresh memory that processes can inherit. Whoever asked closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("octavo-pulse")
        os.truncate(fd, _SIZE)
    else:
        with tempfile.TemporaryFile(prefix="octavo-") as file:
            file.write(bytes(_SIZE))  # taken now: a disk that is full later must not matter
            file.flush()
            fd = os.dup(file.fileno())
    return fd


class Pulse:
    """All times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one machine; 0: never."""

    def __init__(self, fd: int = -1) -> None:
        """−1: shared with nobody."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("q")
        self._beats = memoryview(self._memory)[_BEATS:].cast("q")

    # ── the engine writes ──

    def reset(self) -> None:
        """A new engine's first word: nothing of the one before it is true any more."""
        self._memory[: 8 * _RESTARTS] = bytes(8 * _RESTARTS)
        self._memory[8 * _WORDS : _BEATS] = bytes(_BEATS - 8 * _WORDS)
        self._words[_PID] = os.getpid()

    def rest(self) -> None:
        """There is nothing to do. To be said every second or so."""
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 0

    def begin(self) -> None:
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 1

    def end(self, num_steps: int, num_running: int, num_waiting: int) -> None:
        words = self._words
        words[_BEAT] = words[_LAST_STEP] = time.monotonic_ns()
        words[_NUM_STEPS] = num_steps
        words[_NUM_RUNNING] = num_running
        words[_NUM_WAITING] = num_waiting

    def seat(self, left: Iterable[int], entered: Iterable[tuple[int, str]]) -> None:
        """Rows that are free now, then (row, request id) of who took one: before the step that computes them."""
        for row in left:
            if row < _MAX_ROWS:
                self._memory[8 * _WORDS + row * _SLOT] = 0
        for row, name in entered:
            if row < _MAX_ROWS:
                encoded = name.encode()[: _SLOT - 1]
                start = 8 * _WORDS + row * _SLOT
                self._memory[start + 1 : start + 1 + len(encoded)] = encoded
                self._memory[start] = len(encoded)

    # ── an API process writes ──

    def turn(self, origin: int) -> None:
        """Its event loop turns. To be said every second or so."""
        if origin < _MAX_SERVERS:
            self._beats[origin] = time.monotonic_ns()

    # ── the supervisor writes ──

    def forget(self, origin: int) -> None:
        """Another API process of this number is started, and has said nothing yet."""
        if origin < _MAX_SERVERS:
            self._beats[origin] = 0

    def stalled(self, seconds: float) -> None:
        """For so long it has neither turned nor computed."""
        self._words[_STALLED] = int(seconds * 1e9)

    def count_restart(self, process: str, cause: str) -> None:
        self._words[_RESTARTS + CAUSES.index((process, cause))] += 1

    # ── everybody reads ──

    def restarts(self) -> dict[tuple[str, str], int]:
        """(process, cause) → how often one was started again."""
        return {key: self._words[_RESTARTS + at] for at, key in enumerate(CAUSES)}

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def beat(self) -> int:
        """Its last sign of life."""
        return self._words[_BEAT]

    @property
    def is_stepping(self) -> bool:
        return bool(self._words[_IS_STEPPING])

    @property
    def last_step(self) -> int:
        return self._words[_LAST_STEP]

    @property
    def num_steps(self) -> int:
        return self._words[_NUM_STEPS]

    @property
    def num_running(self) -> int:
        return self._words[_NUM_RUNNING]

    @property
    def num_waiting(self) -> int:
        return self._words[_NUM_WAITING]

    @property
    def stalled_seconds(self) -> float:
        return self._words[_STALLED] / 1e9

    def beat_of(self, origin: int) -> int:
        """An API process's last sign of life."""
        return self._beats[origin] if origin < _MAX_SERVERS else 0

    def seated(self) -> list[str]:
        """Requests that hold a row, each once: those that a step that does not end is about."""
        names: dict[str, None] = {}
        for start in range(8 * _WORDS, _BEATS, _SLOT):
            if length := self._memory[start]:
                names[self._memory[start + 1 : start + 1 + length].decode(errors="replace")] = None
        return list(names)

    def close(self) -> None:
        self._words.release()
        self._beats.release()
        self._memory.close()


def is_named(request_id: str, seated: Iterable[str]) -> bool:
    """Whether a request is among the seated ones, whose names may be cut."""
    return request_id.encode()[: _SLOT - 1].decode(errors="replace") in seated
