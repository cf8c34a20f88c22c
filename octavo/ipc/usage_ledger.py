"""UsageLedger: what every API key has used, in a file that the API processes of a server map into their memory (decision 054).

A token is counted when an engine's message hands it to an API process, by a store to memory. The kernel keeps that however the process ends;
`sync` brings it to the disk, once a second, so that a machine that stops loses a second at most. Each API process has a row of words of
its own, which no other writes: a count is never lost to another's. It claims the row with a lock that ends with the process, however that
ends; the next process that claims the row goes on with its counts. So any number of servers can share a ledger, and a key's limits hold
over all of them (decision 060).

Limits hold over all API processes. What is left of one is read and taken under a lock of the file, so a budget is never exceeded, by a
token either, and is used up to its last one."""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from octavo.errors import ConfigError
from octavo.key_settings import KeySettings

_MAGIC = b"octavo-usage-01\n"
ID_BYTES = 16
MAX_KEYS = 4096
MAX_ROWS = 256
"""API processes of all servers that share the ledger."""
_OLD_ROWS = 64
"""Of files that older versions have made."""
_HEAD = 4096
_NUM_ROWS = 64  # offset of the number of rows that were ever used
_IDS = _HEAD  # offset of the keys' ids
_SHARED = _IDS + MAX_KEYS * ID_BYTES  # offset of the words that all processes write, under the lock
_NUM_SHARED = 2
_REQUESTS_UNTIL, _TOKENS_UNTIL = range(_NUM_SHARED)
_ROWS = _SHARED + 8 * _NUM_SHARED * MAX_KEYS  # offset of the words that one process writes
_NUM_WORDS = 8
_PROMPT, _OUTPUT, _REQUESTS, _DAY, _BEFORE, _IN_FLIGHT, _AT_CLAIM, _NUM_CLAIMS = range(8)
_SIZE = _ROWS + 8 * _NUM_WORDS * MAX_KEYS * MAX_ROWS
_OLD_SIZE = _ROWS + 8 * _NUM_WORDS * MAX_KEYS * _OLD_ROWS
_MAX_WORD = 2**60
"""Of a count: no server gets that far, and twice as much still fits a word."""
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid
_DAY_SECONDS = 86400
_MINUTE = 60_000_000_000  # nanoseconds
_LOCK_SECONDS = 0.2
"""A process holds the lock for microseconds, unless it is stopped meanwhile: then the others go on without it."""

LimitKind = Literal["budget", "tokens in flight", "requests", "tokens"]


class Used(NamedTuple):
    """Of one key, since its first request."""

    prompt_tokens: int
    output_tokens: int
    num_requests: int
    today: int  # tokens, since midnight (UTC)
    in_flight: int  # tokens of prompts and max_tokens of open requests


class Refusal(NamedTuple):
    """Why a request is not admitted, and in how many seconds one would be."""

    kind: LimitKind
    seconds: int


class Remaining(NamedTuple):
    """What is left of a limit, and in how many seconds all of it will be."""

    limit: int
    left: int
    seconds: float


class Charge(msgspec.Struct, frozen=True):
    """A charge that a process is about to make, written down by it: another process can tell whether it was made (Account.was_made)."""

    total: int  # tokens that are counted for one request then, prompt included
    count: int  # of them, by this charge
    row: int  # of the process
    claim: int  # which of the processes that had the row
    sum: int  # of the key's tokens in this row, then


class UsageLedger:
    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Claims a row, until `close` or the end of the process. `clock`: seconds since 1970. Raises ConfigError."""
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A file of its own: some file systems do not tell locks of a range from locks of the file.
        self._claims = os.open(path.with_suffix(".rows"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._locked():
                self._create(path)
                self._row = self._claim()
            self._memory = mmap.mmap(self._fd, _SIZE)
        except BaseException:
            os.close(self._fd)
            os.close(self._claims)
            raise
        whole = memoryview(self._memory)
        self._head = whole[_NUM_ROWS : _NUM_ROWS + 8].cast("q")
        self._shared = whole[_SHARED:_ROWS].cast("q")
        self._words = whole[_ROWS:_SIZE].cast("q")
        self._slots: dict[bytes, int] = {}
        self._is_dirty = False
        with self._locked():
            self._head[0] = max(self._num_rows, self._row + 1)

    @property
    def _num_rows(self) -> int:
        """Rows that were ever used. A file may be damaged: then all of them."""
        found = self._head[0]
        return found if 0 <= found <= MAX_ROWS else MAX_ROWS

    def _create(self, path: Path) -> None:
        size = os.fstat(self._fd).st_size
        if size not in (0, _OLD_SIZE, _SIZE) or os.pread(self._fd, len(_MAGIC), 0) not in (
            b"",
            _MAGIC,
            bytes(len(_MAGIC)),
        ):
            raise ConfigError(f"{path} is no ledger of usage that this version can read: move it away")
        if size < _SIZE:
            os.ftruncate(self._fd, _SIZE)  # what is not written takes no room on the disk
        if os.pread(self._fd, len(_MAGIC), 0) != _MAGIC:  # new, or its maker was killed before it had written it
            os.pwrite(self._fd, _MAGIC, 0)
            os.fsync(self._fd)

    def _claim(self) -> int:
        """Lock the first row that no process has. Raises ConfigError."""
        for row in range(MAX_ROWS):
            # Of the open file, not of the process: the lock ends with the last descriptor of it.
            with contextlib.suppress(BlockingIOError):
                fcntl.fcntl(self._claims, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0))
                return row
        raise ConfigError(f"usage is counted for {MAX_ROWS} API processes at most: lower --api-processes")

    def _is_claimed(self, row: int) -> bool:
        """Whether a process that lives has the row."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0)
        found: bytes = fcntl.fcntl(self._claims, fcntl.F_OFD_GETLK, asked)
        return row == self._row or _FLOCK.unpack(found)[0] != fcntl.F_UNLCK

    def close(self) -> None:
        self.sync()
        self._head.release()
        self._shared.release()
        self._words.release()
        self._memory.close()
        os.close(self._fd)
        os.close(self._claims)

    def sync(self) -> None:
        """Bring what was counted to the disk. May be called by another thread."""
        if self._is_dirty:
            self._is_dirty = False
            os.fdatasync(self._fd)

    def accounts(self, keys: dict[bytes, KeySettings]) -> "dict[bytes, Account]":
        """The accounts of all keys of the server, by their ids. Ids that the server does not have any more make room for new ones."""
        with self._locked():
            ids = self._memory[_IDS:_SHARED]
            held = [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]
            self._slots = {held_id: at for at, held_id in enumerate(held) if any(held_id)}
            free = [at for at, held_id in enumerate(held) if not any(held_id)][::-1]
            for key_id in keys:
                if key_id in self._slots:
                    continue
                if not free:
                    free = [at for held_id, at in self._slots.items() if held_id not in keys]
                    if not free:
                        raise ConfigError(f"usage is counted for {MAX_KEYS} keys at most: give fewer")
                    self._slots = {held_id: at for held_id, at in self._slots.items() if held_id in keys}
                slot = self._slots[key_id] = free.pop()
                self._clear(slot)
                self._memory[_IDS + slot * ID_BYTES : _IDS + (slot + 1) * ID_BYTES] = key_id
            self._is_dirty = True
        return {key_id: Account(self, self._slots[key_id], settings) for key_id, settings in keys.items()}

    def _clear(self, slot: int) -> None:
        self._memory[_IDS + slot * ID_BYTES : _IDS + (slot + 1) * ID_BYTES] = bytes(ID_BYTES)
        for word in range(_NUM_SHARED):
            self._shared[slot * _NUM_SHARED + word] = 0
        for row in range(self._num_rows):
            start = self._at(row, slot)
            for word in range(_NUM_WORDS):
                self._words[start + word] = 0

    @staticmethod
    def _at(row: int, slot: int) -> int:
        return (row * MAX_KEYS + slot) * _NUM_WORDS

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    yield
                    return
                time.sleep(0)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Account:
    """One key's words."""

    def __init__(self, ledger: UsageLedger, slot: int, settings: KeySettings) -> None:
        self.settings = settings
        self._ledger, self._slot = ledger, slot
        self._mine = ledger._at(ledger._row, slot)
        self._rows = [ledger._at(row, slot) for row in range(MAX_ROWS)]
        self.forget_ended()
        ledger._words[self._mine + _IN_FLIGHT] = 0  # what a predecessor had open has ended with it
        for word in (_PROMPT, _OUTPUT, _REQUESTS, _DAY, _BEFORE):  # a damaged file must not make sums overflow
            if not 0 <= ledger._words[self._mine + word] <= _MAX_WORD:
                ledger._words[self._mine + word] = 0
        # The sum first: what a predecessor was about to charge is compared with it.
        ledger._words[self._mine + _AT_CLAIM] = self._sum_of(self._mine)
        ledger._words[self._mine + _NUM_CLAIMS] = max(0, ledger._words[self._mine + _NUM_CLAIMS] % _MAX_WORD) + 1
        self._has_lock = bool(settings.budget_tokens or settings.tpm)

    # ── what is counted ──

    def charge(self, num_prompt: int, num_output: int) -> int:
        """Count tokens that were handed over: those of a prompt, with its first output, and output. Returns how many of the output tokens the
        budget allows, which are counted; −1: nor the prompt, and nothing is."""
        if not self._has_lock:
            self._add(num_prompt, num_output)
            return num_output
        with self._ledger._locked():
            budget = self.settings.budget_tokens
            if budget and (left := budget - self._today()) < num_prompt + num_output:
                if left < num_prompt:
                    return -1
                num_output = left - num_prompt
            self._add(num_prompt, num_output)
            if self.settings.tpm:
                self._fill(_TOKENS_UNTIL, self.settings.tpm, num_output)
        return num_output

    def next_charge(self, total: int, count: int) -> Charge:
        """The charge of `count` tokens that is made next, for a request that then has `total`."""
        words, at, ledger = self._ledger._words, self._mine, self._ledger
        return Charge(total, count, ledger._row, words[at + _NUM_CLAIMS], self._sum_of(at) + count)

    def was_made(self, charge: Charge) -> bool:
        """Whether a process that has ended has made this charge, or was killed before. Of a process whose row was claimed more than once since
        it is not known: then it was, so that no token is counted twice."""
        if not 0 <= charge.row < MAX_ROWS:  # the file is damaged
            return True
        words, at = self._ledger._words, self._rows[charge.row]
        num_since = words[at + _NUM_CLAIMS] - charge.claim
        if num_since > 1:
            return True
        return (words[at + _AT_CLAIM] if num_since == 1 else self._sum_of(at)) >= charge.sum

    def _sum_of(self, at: int) -> int:
        return self._ledger._words[at + _PROMPT] + self._ledger._words[at + _OUTPUT]

    def _add(self, num_prompt: int, num_output: int) -> None:
        words, at = self._ledger._words, self._mine
        day = int(self._ledger._clock()) // _DAY_SECONDS
        if words[at + _DAY] != day:  # `before` first: if the process is killed between the two, it is set again
            words[at + _BEFORE] = words[at + _PROMPT] + words[at + _OUTPUT]
            words[at + _DAY] = day
        if num_prompt:
            words[at + _PROMPT] += num_prompt
        words[at + _OUTPUT] += num_output
        self._ledger._is_dirty = True

    def hold(self, num_tokens: int) -> None:
        """A request has come (or ended, if negative) that may take so many tokens."""
        self._ledger._words[self._mine + _IN_FLIGHT] += num_tokens

    # ── limits ──

    def admit(self, num_prompt: int, num_in_flight: int) -> Refusal | None:
        """Count a request and let it begin, unless a limit says no. `num_in_flight`: tokens that it may take at most."""
        limits = self.settings
        with self._ledger._locked() if limits.has_limits else contextlib.nullcontext():
            if limits.budget_tokens and limits.budget_tokens - self._today() < max(1, num_prompt):
                return Refusal("budget", self.seconds_of_day())
            in_flight = limits.max_tokens_in_flight
            if in_flight and self._sum(_IN_FLIGHT) + num_in_flight > in_flight:
                self.forget_ended()
                if self._sum(_IN_FLIGHT) + num_in_flight > in_flight:
                    return Refusal("tokens in flight", 1)
            if limits.rpm and (wait := self._wait(_REQUESTS_UNTIL, limits.rpm, 1)):
                return Refusal("requests", wait)
            if limits.tpm and (wait := self._wait(_TOKENS_UNTIL, limits.tpm, min(num_prompt, limits.tpm))):
                return Refusal("tokens", wait)
            if limits.rpm:
                self._fill(_REQUESTS_UNTIL, limits.rpm, 1)
            if limits.tpm:
                self._fill(_TOKENS_UNTIL, limits.tpm, num_prompt)
            self._ledger._words[self._mine + _REQUESTS] += 1
            self._ledger._is_dirty = True
        return None

    def remaining_requests(self) -> Remaining | None:
        """Of the requests a minute. None: there is no limit."""
        return self._remaining(_REQUESTS_UNTIL, self.settings.rpm) if self.settings.rpm else None

    def remaining_tokens(self) -> Remaining | None:
        """Of the tokens a minute, or else of the day's budget. None: there is no limit."""
        if self.settings.tpm:
            return self._remaining(_TOKENS_UNTIL, self.settings.tpm)
        if budget := self.settings.budget_tokens:
            return Remaining(budget, max(0, budget - self._today()), self.seconds_of_day())
        return None

    def is_spent(self) -> bool:
        """Whether nothing is left of the day's budget."""
        return bool(self.settings.budget_tokens) and self._today() >= self.settings.budget_tokens

    def forget_ended(self) -> None:
        """Forget what processes had open that have ended without closing it."""
        ledger = self._ledger
        for row, at in enumerate(self._rows[: ledger._num_rows]):
            if ledger._words[at + _IN_FLIGHT] and not ledger._is_claimed(row):
                ledger._words[at + _IN_FLIGHT] = 0

    def used(self) -> Used:
        self.forget_ended()
        return Used(
            self._sum(_PROMPT), self._sum(_OUTPUT), self._sum(_REQUESTS), self._today(), max(0, self._sum(_IN_FLIGHT))
        )

    def _sum(self, word: int) -> int:
        words = self._ledger._words
        return sum(words[at + word] for at in self._rows[: self._ledger._num_rows])

    def _today(self) -> int:
        words, day = self._ledger._words, int(self._ledger._clock()) // _DAY_SECONDS
        return sum(
            words[at + _PROMPT] + words[at + _OUTPUT] - words[at + _BEFORE]
            for at in self._rows[: self._ledger._num_rows]
            if words[at + _DAY] == day
        )

    def seconds_of_day(self) -> int:
        return _DAY_SECONDS - int(self._ledger._clock()) % _DAY_SECONDS

    # A limit a minute is a bucket that is refilled evenly: the word is the time at which it will be full.

    def _full_at(self, word: int) -> tuple[int, int]:
        """(now, when the bucket is full), in nanoseconds. A clock that was set back does not lock a key out."""
        now = int(self._ledger._clock() * 1e9)
        full_at = self._ledger._shared[self._slot * _NUM_SHARED + word]
        return now, max(now, min(full_at, now + 2 * _MINUTE))

    def _fill(self, word: int, limit: int, amount: int) -> None:
        _, full_at = self._full_at(word)
        self._ledger._shared[self._slot * _NUM_SHARED + word] = full_at + amount * _MINUTE // limit

    def _wait(self, word: int, limit: int, amount: int) -> int:
        """Seconds until the bucket has so much. 0: it has."""
        now, full_at = self._full_at(word)
        late = full_at + amount * _MINUTE // limit - now - _MINUTE
        return 0 if late <= 0 else -(-late // 1_000_000_000)

    def _remaining(self, word: int, limit: int) -> Remaining:
        now, full_at = self._full_at(word)
        left = limit - -(-(full_at - now) * limit // _MINUTE)
        return Remaining(limit, max(0, left), (full_at - now) / 1e9)
