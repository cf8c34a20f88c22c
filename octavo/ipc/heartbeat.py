"""Heartbeat: a small block of memory that the engine shares with its supervisor and the API processes. It says whether the engine
makes progress, and which requests hold a row or are being taken in.

The memory has no name in a file system, so nothing is left behind, and it can be read without the help of an engine that may
hang. Every word has one writer. The engine writes a few words in each iteration of its loop, and a row's request id when it
changes."""

import mmap
import os
import time
from collections.abc import Iterable

from octavo.ipc.anonymous_memory import anonymous_memory

_WORDS = 64
_PID, _BEAT, _IS_STEPPING, _LAST_STEP, _NUM_STEPS, _NUM_RUNNING, _NUM_WAITING, _STALLED, _NUM_TOKENS, _SEEN = range(10)
_PULSE, _BACKLOG = 10, 11
_RESTARTS = 16  # the first of the words that a new engine does not reset
_LONGEST = 32  # among them the time of the slowest recent step, one word for each size bucket
_NUM_SIZES = 24  # size buckets by powers of two; the last also holds all larger steps
_LONG = 100_000_000  # nanoseconds; the times of shorter steps are not kept
_KEPT = 98  # percent to which the slowest time decays with each further step of its size
CAUSES = (
    ("engine", "killed"),  # by a signal that the supervisor did not send
    ("engine", "failed"),  # it exited
    ("engine", "hung"),  # the supervisor killed it
    ("engine", "start"),  # it ended before it was ready
    ("api", "killed"),
    ("api", "failed"),
    ("api", "hung"),
    ("api", "start"),
)
"""Which process was restarted, and why."""
_PACE, _EVER_SEEN = _RESTARTS + len(CAUSES), _RESTARTS + len(CAUSES) + 1
_SLOT = 64  # bytes for a row's request: one byte for the length of its id, then the id, truncated if need be
_MAX_ROWS = 4096  # requests in rows beyond these are not written
NUM_PREPARED = 64  # requests that are taken in or wait for their grammar; those beyond these are not written
_BEATS = 8 * _WORDS + _SLOT * (_MAX_ROWS + NUM_PREPARED)  # offset of the API processes' heartbeats, one word each
_MAX_SERVERS = 1024  # API processes beyond these are not watched
_TAKEN = _BEATS + 8 * _MAX_SERVERS  # offset of the latest submission times taken in, one word per API process
REFUSALS = (
    ("malformed", "syntax"),  # not HTTP
    ("malformed", "head"),  # a head, trailers or framing beyond the limits
    ("forbidden", "host"),  # a Host that this server does not go by
    ("forbidden", "origin"),  # another site's web page
    ("forbidden", "content_type"),  # a web page's form
)
"""Requests that API processes refuse before their key or their content is looked at, and why."""
_REFUSED = _TAKEN + 8 * _MAX_SERVERS  # offset of their counts, one word per API process and reason
_SIZE = _REFUSED + 8 * _MAX_SERVERS * len(REFUSALS)
_BLOCK = -(-_SIZE // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY  # where blocks begin
PULSE_SECONDS = 0.25
# Of an engine on another machine a copy of its block is kept here (octavo/cluster/mirror.py). As (first byte, end):
ENGINE_PARTS = (
    (8 * _BEAT, 8 * _STALLED),  # not its process number, which means another process here
    (8 * _NUM_TOKENS, 8 * _RESTARTS),
    (8 * _PACE, 8 * _WORDS),
    (8 * _WORDS, _BEATS),
    (_TAKEN, _REFUSED),
)
"""What the engine writes."""
SERVER_PARTS = ((8 * _RESTARTS, 8 * _PACE), (_REFUSED, _SIZE))
"""What its metrics show, and others write."""
LEGACY_PARTS = ((8 * _PACE, 8 * _WORDS), (_TAKEN, _REFUSED))
"""What an engine leaves to the next."""


def shared_memory(num_blocks: int = 1) -> int:
    """Return a descriptor of fresh memory that processes can inherit: one block for each replica. The caller closes it."""
    return anonymous_memory("octavo-heartbeat", num_blocks * _BLOCK)


def block_memory(fd: int, block: int = 0) -> mmap.mmap:
    """The bytes of one block. The caller closes it."""
    return mmap.mmap(fd, _SIZE, offset=block * _BLOCK)


class Heartbeat:
    """The shared block. All times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one machine; 0: never."""

    def __init__(self, fd: int = -1, block: int = 0) -> None:
        """`fd`: from `shared_memory()`. −1: private memory. `block`: the replica's number."""
        self._memory = mmap.mmap(fd, _SIZE, offset=block * _BLOCK if fd >= 0 else 0)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("q")
        self._beats = memoryview(self._memory)[_BEATS:_TAKEN].cast("q")
        self._taken = memoryview(self._memory)[_TAKEN:_REFUSED].cast("q")
        self._refused = memoryview(self._memory)[_REFUSED:].cast("q")
        self._num_tokens = 0  # tokens of the current step
        self._noted = -1  # tokens of the last step whose time was noted
        self._is_long = False  # whether the slowest time of that step's size exceeds _LONG

    # ── the engine writes ──

    def reset(self) -> None:
        """Clear the words that describe the previous engine. A new engine calls this first."""
        self._memory[: 8 * _RESTARTS] = bytes(8 * _RESTARTS)
        self._memory[8 * _WORDS : _BEATS] = bytes(_BEATS - 8 * _WORDS)
        self._words[_PID] = os.getpid()
        self._num_tokens, self._noted, self._is_long = 0, -1, False

    def set_pid(self, pid: int) -> None:
        """Set the engine's process number. 0: it is on another machine."""
        self._words[_PID] = pid

    def pulse(self) -> None:
        """Report that the process runs, whatever its steps do. A thread calls this every PULSE_SECONDS."""
        self._words[_PULSE] = time.monotonic_ns()

    def set_backlog(self, seconds: float) -> None:
        """Set how many seconds of work wait in the engine."""
        self._words[_BACKLOG] = _nanoseconds(seconds)

    def rest(self) -> None:
        """Report an idle engine. To be called about once a second."""
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 0

    def begin(self) -> None:
        """Report that an iteration of the loop begins."""
        words = self._words
        words[_BEAT] = time.monotonic_ns()
        words[_IS_STEPPING] = 1

    def size(self, num_tokens: int) -> None:
        """Set the number of tokens computed before the next end(). The expected duration of the step depends on it."""
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
        """Update the slowest recent time of the step's size bucket. `elapsed`: nanoseconds."""
        words, self._noted = self._words, self._num_tokens
        at = _size(self._num_tokens)
        words[_SEEN] |= 1 << at
        words[_EVER_SEEN] |= 1 << at
        longest = max(elapsed, words[_LONGEST + at] * _KEPT // 100)
        self._is_long = longest > _LONG
        words[_LONGEST + at] = longest if self._is_long else 0

    def seat(self, left: Iterable[int], entered: Iterable[tuple[int, str]]) -> None:
        """Record the rows that became free, then (row, request id) of those taken. To be called before the step computes them."""
        for row in left:
            if row < _MAX_ROWS:
                self._memory[8 * _WORDS + row * _SLOT] = 0
        for row, name in entered:
            if row < _MAX_ROWS:
                self._name(row, name)

    def prepare(self, place: int, name: str) -> None:
        """Record a request that has no row but is worked on: it is taken in, or its grammar is compiled. `place`: below
        NUM_PREPARED. An empty name: none any more."""
        self._name(_MAX_ROWS + place, name)

    def _name(self, slot: int, name: str) -> None:
        encoded = name.encode()[: _SLOT - 1]
        start = 8 * _WORDS + slot * _SLOT
        self._memory[start + 1 : start + 1 + len(encoded)] = encoded
        self._memory[start] = len(encoded)

    def take(self, origin: int, submitted: float) -> None:
        """Record that the request an API process submitted at this time was taken in or refused. A process's requests arrive in
        the order of their times, except those that a previous engine had taken in: they may come again."""
        if origin < _MAX_SERVERS:
            self._taken[origin] = max(self._taken[origin], _nanoseconds(submitted))

    def move(self, seconds_per_request: float) -> None:
        """Set the queue's pace: the time until the next waiting request gets a row. A new engine does not reset it."""
        self._words[_PACE] = _nanoseconds(seconds_per_request)

    # ── an API process writes ──

    def api_beat(self, origin: int) -> None:
        """Report that an API process's event loop runs. To be called about once a second."""
        if origin < _MAX_SERVERS:
            self._beats[origin] = time.monotonic_ns()

    def count_refusal(self, origin: int, kind: str, reason: str) -> None:
        """Count a request that an API process refused. Its successor, and the next engine, continue the count."""
        if origin < _MAX_SERVERS:
            self._refused[origin * len(REFUSALS) + REFUSALS.index((kind, reason))] += 1

    # ── the supervisor writes ──

    def forget(self, origin: int) -> None:
        """Clear an API process's heartbeat, because its successor is being started."""
        if origin < _MAX_SERVERS:
            self._beats[origin] = 0

    def stalled(self, seconds: float) -> None:
        """Set for how long the engine has neither sent a heartbeat nor used CPU time."""
        self._words[_STALLED] = int(seconds * 1e9)

    def count_restart(self, process: str, cause: str) -> None:
        self._words[_RESTARTS + CAUSES.index((process, cause))] += 1

    # ── all processes read ──

    def restarts(self) -> dict[tuple[str, str], int]:
        """Number of restarts by (process, cause)."""
        return {key: self._words[_RESTARTS + at] for at, key in enumerate(CAUSES)}

    def refusals(self) -> dict[tuple[str, str], int]:
        """Number of refused requests of all API processes by (kind, reason)."""
        return {key: sum(self._refused[at :: len(REFUSALS)]) for at, key in enumerate(REFUSALS)}

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def beat(self) -> int:
        """Time of the engine's last heartbeat."""
        return self._words[_BEAT]

    @property
    def last_pulse(self) -> int:
        """Time of the process's last pulse. 0: it sends none."""
        return self._words[_PULSE]

    @property
    def backlog_seconds(self) -> float:
        return self._words[_BACKLOG] / 1e9

    @property
    def is_stepping(self) -> bool:
        return bool(self._words[_IS_STEPPING])

    @property
    def num_tokens(self) -> int:
        """Tokens of the current step."""
        return self._words[_NUM_TOKENS]

    def usual(self) -> tuple[float, bool] | None:
        """Estimate how long the current step takes at most: (seconds, whether this engine has run a step of its size). The
        slowest recent step in this size bucket or below; if no engine has run this bucket, the slowest of any size, scaled by the
        number of tokens if this step is larger than the largest. At least a tenth of a second. None: no engine has run a step."""
        words = self._words
        at, ever = _size(self.num_tokens), words[_EVER_SEEN]
        if not ever:
            return None
        longest = words[_LONGEST : _LONGEST + (at + 1 if ever >> at & 1 else _NUM_SIZES)]
        largest = (1 << ever.bit_length() - 1) // 2  # fewest tokens of the largest bucket that was run
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
        """The queue's pace; one request a second if none is known yet."""
        return self._words[_PACE] / 1e9 or 1.0

    def has_taken(self, origin: int, submitted: float) -> bool:
        """Whether an engine has taken in what an API process submitted at that time. True for processes beyond _MAX_SERVERS."""
        return origin >= _MAX_SERVERS or _nanoseconds(submitted) <= self._taken[origin]

    def beat_of(self, origin: int) -> int:
        """Time of an API process's last heartbeat."""
        return self._beats[origin] if origin < _MAX_SERVERS else 0

    def seated(self) -> list[str]:
        """Ids of the requests that hold a row or are being prepared, each once and possibly truncated: the suspects if the engine
        hangs or ends."""
        names: dict[str, None] = {}
        for start in range(8 * _WORDS, _BEATS, _SLOT):
            if length := self._memory[start]:
                names[self._memory[start + 1 : start + 1 + length].decode(errors="replace")] = None
        return list(names)

    def close(self) -> None:
        self._words.release()
        self._beats.release()
        self._taken.release()
        self._refused.release()
        self._memory.close()


def _size(num_tokens: int) -> int:
    """Return the size bucket. 0: no tokens, 1: one, 2: two or three, 3: four to seven …"""
    return min(num_tokens.bit_length(), _NUM_SIZES - 1)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def is_named(request_id: str, seated: Iterable[str]) -> bool:
    """Whether a request is in the result of `seated()`, whose ids may be truncated."""
    return request_id.encode()[: _SLOT - 1].decode(errors="replace") in seated
