"""Messages between a rank, its fork server and the grammar processes, and their framing: a length of four bytes before each."""

import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

M = TypeVar("M")
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode

# ── a rank → its fork server ──


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """The first message."""

    tokens: list[bytes]  # bytes that each token adds to a text
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    vocab_size: int  # logits of the model
    num_slots: int
    num_threads: int  # that one process may use for the masks of a step
    compile_seconds: float  # of processor time
    step_seconds: float  # of processor time, for one token
    memory_bytes: int  # that one process may allocate


class Begun(msgspec.Struct, array_like=True, frozen=True):
    error: str  # why there can be no grammars; empty: there can be


class Fork(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Start a process. The answer is its id, and a socket to it."""


class End(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Kill a process if it still runs. The answer is its exit code (negative: a signal)."""

    pid: int


# ── a rank → a grammar process ──


class Compile(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The first command. The answer is Compiled."""

    grammar: str


class Compiled(msgspec.Struct, array_like=True, frozen=True):
    error: str  # empty: it is ready
    looks_from: int  # tokens left at which the end of an answer is first searched for
    num_bytes: int = 0  # of memory that this process alone has; 0: not known


class Enter(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A row with this grammar. It gets its masks into a slot of the shared memory."""

    number: int  # unique for this rank
    slot: int
    stop_ids: list[int]
    prompt_len: int
    min_tokens: int
    max_tokens: int
    ignores_eos: bool
    ends_by_eos: bool  # the request names no stop tokens of its own


class Leave(msgspec.Struct, array_like=True, frozen=True, tag=3):
    number: int


class RowToFill(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: int
    new_tokens: list[int]  # of its output, since the last time; the first time all of them
    length: int  # tokens of prompt and output
    drafts: list[int] = []  # tokens that may follow (decision 048): masks behind them are wanted, too, …
    slots: list[int] = []  # … in these slots
    num_there: int = 0  # … of which the first so many have them already
    num_forced: int = 0  # tokens of a forced stretch that are wanted at most


class Fill(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Advance rows by their tokens and compute their masks. The answer is Filled."""

    rows: list[RowToFill]


class FilledRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: int
    length: int
    is_last: bool  # the token sampled now ends the row, because of max_tokens
    failure: str  # why the grammar cannot continue; its mask is not to be used
    num_ahead: int = 0  # drafted tokens that have a mask behind them
    forced: list[int] = []  # tokens of a stretch that the grammar forces from here on (forced.py)


class Filled(msgspec.Struct, array_like=True, frozen=True):
    """The answer to one Fill. It has no rows if every row that was asked for has its mask, and there is nothing else to say: the usual
    case, in which reading each of them would take longer than all else that a rank does for a mask."""

    rows: list[FilledRow] = []


ServerCommand = Fork | End
Command = Compile | Enter | Leave | Fill


def framed(message: object) -> bytes:
    content = _encode(message)
    return _LENGTH.pack(len(content)) + content


class Inbox:
    """Collects bytes, and gives the complete messages among them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield message


def receive(line: socket.socket) -> bytes:
    """Wait for one message. Raises EOFError when the other end is closed, and TimeoutError as the socket does."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = line.recv(min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
