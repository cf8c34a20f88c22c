"""Pulse: a few numbers in memory that the engine shares with its supervisor and the API processes: does it turn, and with whom.
Knows nothing of what is done about it.

It has no name in any file system, so nothing of it stays behind, and reading it asks nothing of an engine that may hang. Every
word has one writer. The engine writes a few words in each turn of its loop, and a row's occupant when that changes."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterable

_WORDS = 64
_PID, _BEAT, _IS_STEPPING, _LAST_STEP, _NUM_STEPS, _NUM_RUNNING, _NUM_WAITING, _STALLED, _NUM_TOKENS, _SEEN = range(10)
_RESTARTS = 16  # the first of the words that outlive an engine
_LONGEST = 32  # … among them what steps took, a word for each size
_NUM_SIZES = 24  # by powers of two; the last is also for whatever is larger
_LONG = 100_000_000  # nanoseconds; shorter steps are not worth a note
_KEPT = 98  # percent of the longest step's time that are left when another of its size has ended
CAUSES = (
    ("engine", "killed"),  # by a signal from elsewhere
    ("engine", "failed"),  # it ended itself
    ("engine", "hung"),  # the supervisor ended it
    ("engine", "start"),  # it did not come up
    ("api", "killed"),
    ("api", "failed"),
    ("api", "hung"),
    ("api", "start"),
)
"""Which process was started again, and why."""
_PACE, _EVER_SEEN = _RESTARTS + len(CAUSES), _RESTARTS + len(CAUSES) + 1
_SLOT = 64  # bytes for a row's occupant: how long its id is, then the id, cut if need be
_MAX_ROWS = 4096  # occupants of rows beyond these are not told
_BEATS = 8 * _WORDS + _SLOT * _MAX_ROWS  # where API processes write, a word each
_MAX_SERVERS = 1024  # those beyond these are not watched
_TAKEN = _BEATS + 8 * _MAX_SERVERS  # where engines write how far they are with each API process's requests
_SIZE = _TAKEN + 8 * _MAX_SERVERS


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


class Heartbeat:
    """All times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one machine; 0: never."""

    def __init__(self, fd: int = -1) -> None:
        """−1: shared with nobody."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("q")
        self._beats = memoryview(self._memory)[_BEATS:_TAKEN].cast("q")
        self._taken = memoryview(self._memory)[_TAKEN:].cast("q")
        self._num_tokens = 0  # of the step that is computed
        self._noted = -1  # … of the last whose time is noted
        self._is_long = False  # steps of that size are

    # ── the engine writes ──

    def reset(self) -> None:
        """A new engine's first word: nothing of the one before it is true any more."""
        self._memory[: 8 * _RESTARTS] = bytes(8 * _RESTARTS)
        self._memory[8 * _WORDS : _BEATS] = bytes(_BEATS - 8 * _WORDS)
        self._words[_PID] = os.getpid()
        self._num_tokens, self._noted, self._is_long = 0, -1, False

    def rest(self) -> None:
        """There is nothing to do. To be said every second or so."""
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 0

    def begin(self) -> None:
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 1

    def size(self, num_tokens: int) -> None:
        """So many tokens are computed before the next end(): what a step takes depends on it."""
        if num_tokens != self._num_tokens:
            self._words[_NUM_TOKENS] = self._num_tokens = num_tokens

    def end(self, num_steps: int, num_running: int, num_waiting: int) -> None:
        words = self._words
        now = time.monotonic_ns()
        elapsed = now - words[_BEAT]
        if elapsed > _LONG or self._num_tokens != self._noted or self._is_long:
            self._note(elapsed)
        words[_BEAT] = words[_LAST_STEP] = now
        words[_NUM_STEPS] = num_steps
        words[_NUM_RUNNING] = num_running
        words[_NUM_WAITING] = num_waiting

    def _note(self, elapsed: int) -> None:
        words, self._noted = self._words, self._num_tokens
        at = _size(self._num_tokens)
        words[_SEEN] |= 1 << at
        words[_EVER_SEEN] |= 1 << at
        longest = max(elapsed, words[_LONGEST + at] * _KEPT // 100)
        self._is_long = longest > _LONG
        words[_LONGEST + at] = longest if self._is_long else 0

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

    def take(self, origin: int, submitted: float) -> None:
        """An API process's request of that time is taken in, or refused. Its requests come in the order of their times; those that
        an engine before this one took in may come again."""
        if origin < _MAX_SERVERS:
            self._taken[origin] = max(self._taken[origin], _nanoseconds(submitted))

    def move(self, seconds_per_request: float) -> None:
        """How fast the queue moves: what the next one to get a row takes. Outlives the engine, as the last that is known."""
        self._words[_PACE] = _nanoseconds(seconds_per_request)

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
    def num_tokens(self) -> int:
        """What the step that is computed has to do."""
        return self._words[_NUM_TOKENS]

    def usual(self) -> tuple[float, bool] | None:
        """(seconds, whether this engine has computed one of its size): what the step that is computed takes at most. That is what the
        longest of late took, of those that were about as large or smaller if there were such, else so many times that as it is larger
        than the largest. At least a tenth of a second. None: no engine has computed any."""
        words = self._words
        at, ever = _size(self.num_tokens), words[_EVER_SEEN]
        if not ever:
            return None
        longest = words[_LONGEST : _LONGEST + (at + 1 if ever >> at & 1 else _NUM_SIZES)]
        largest = (1 << ever.bit_length() - 1) // 2  # tokens, at least, of the largest there were
        times = max(1.0, self.num_tokens / max(1, largest)) if at >= ever.bit_length() else 1.0
        return max(*longest, _LONG) / 1e9 * times, bool(words[_SEEN] >> at & 1)

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

    @property
    def seconds_per_request(self) -> float:
        """The queue's pace. Without one to go by: as if it was one a second."""
        return self._words[_PACE] / 1e9 or 1.0

    def has_taken(self, origin: int, submitted: float) -> bool:
        """Whether an engine has taken in what an API process submitted at that time. Of those that are not told: yes."""
        return origin >= _MAX_SERVERS or _nanoseconds(submitted) <= self._taken[origin]

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
        self._taken.release()
        self._memory.close()


def _size(num_tokens: int) -> int:
    """0: none, 1: one, 2: two or three, 3: four to seven …"""
    return min(num_tokens.bit_length(), _NUM_SIZES - 1)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def is_named(request_id: str, seated: Iterable[str]) -> bool:
    """Whether a request is among the seated ones, whose names may be cut."""
    return request_id.encode()[: _SLOT - 1].decode(errors="replace") in seated
