"""StreamRecords: what another API process needs to go on with a resumable stream when the process that makes it has ended.

A stream has a file in the server's folder, which only this user can enter: first its HTTP request and the key of the
values that it was given (octavo.fresh), then the tokens, list by list as they were read from the engine, and how many
were counted for its key. The same request with the same values and lists gives the same events, to the byte; the engine
continues behind the last list, as it does for any request whose engine has ended. So nothing of a dialect is in the
file.

The process that makes the stream has a lock on the file, which the system gives back when the process ends, however
that happens. A process that a client asks for the stream, and that gets the lock, takes the stream over. Writing is one
call without a flush: what was written outlives the process."""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.fresh import Source
from octavo.ipc.usage_ledger import Account, Charge
from octavo.messages import GenerateRequest, TokenDelta

log = logging.getLogger("octavo.server")

MAX_RECORD_BYTES = 16 * 2**20
"""Of one stream's file, with its request. A longer stream cannot be taken over."""
MAX_ATTEMPTS = 2
"""Processes that go on with a stream and end without a further token of it. It may be the cause: it ends no more of them."""
MIN_SWEEP_SECONDS = 5.0
_PREFIX = "stream-"
_ID = re.compile(r"[a-z]{2,12}[-_][0-9a-f]{32}")  # as generate.requests.new_id() makes them
_SIZE = 4  # bytes of a part's length

_ATTEMPT = b"\xc0"  # a part that says that another process goes on: MessagePack's nil

_encode = msgspec.msgpack.Encoder().encode
_decode_part: msgspec.msgpack.Decoder[list[TokenDelta] | Charge] = msgspec.msgpack.Decoder(list[TokenDelta] | Charge)


class RecordHead(msgspec.Struct, frozen=True):
    """The HTTP request, and what it was given."""

    path: str
    body: bytes
    owner: bytes
    key: bytes  # of its Source
    now: float
    fingerprint: str  # of the engine that made its tokens


class StreamRecord:
    """One stream's file, and the lock on it."""

    def __init__(self, path: Path, file: int, head: RecordHead, lists: list[list[TokenDelta]], num_bytes: int) -> None:
        """`lists`: the tokens that were read from the engine before it was taken over, in the lists in which they were read."""
        self.id, self.head, self.lists = path.name.removeprefix(_PREFIX), head, lists
        self.is_made_again = not lists  # as far as the lists go
        self.num_attempts = 0  # processes that went on with it, since its last token
        self.charges: list[Charge] = []  # the last that a process was about to make
        self.was_admitted = False  # another process had its request admitted: it counts once for its key's limits
        self._path, self._file, self._num_bytes = path, file, num_bytes

    def source(self) -> Source:
        return Source(self.head.key, self.head.now, os.urandom(4).hex())

    def note_attempt(self) -> None:
        """This process goes on with it."""
        self._append(_ATTEMPT)

    def write(self, deltas: list[TokenDelta]) -> None:
        """To be called before anything is made of these."""
        self._append(_encode(deltas))

    def note_charge(self, charge: Charge) -> None:
        """To be called before it is made."""
        self._append(_encode(charge))

    def num_charged(self, account: Account) -> int:
        """Tokens, with the prompt, that were counted for its key: the last charge may have been written down and not made."""
        if not self.charges:
            return 0
        last = self.charges[-1]
        return last.total if account.was_made(last) else max(0, last.total - last.count)

    def num_known(self, prompt_len: int) -> int:
        """Tokens, with the prompt, that were counted and are in the lists."""
        num_output = sum(len(delta.token_ids) for deltas in self.lists for delta in deltas)
        return prompt_len + num_output if num_output else 0

    def begun(self, request: GenerateRequest) -> GenerateRequest | None:
        """The request as the engine continues it behind the lists. None: every choice has ended."""
        tokens: list[list[int] | None] = [[] for _ in range(request.params.n)]
        for deltas in self.lists:
            for delta in deltas:
                if not 0 <= delta.index < len(tokens):  # the file is damaged
                    continue
                so_far = tokens[delta.index]
                if so_far is not None:
                    so_far += delta.token_ids
                    if delta.finish is not None:
                        tokens[delta.index] = None
        if all(each is None for each in tokens):
            return None
        if any(each is None or each for each in tokens):
            return msgspec.structs.replace(request, begun=tokens)
        return request

    def release(self) -> None:
        """Leave it to others: it could not be taken over now."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def remove(self) -> None:
        """The stream can no longer be resumed."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.release()

    def _append(self, part: bytes) -> None:
        if self._file < 0:
            return
        self._num_bytes += _SIZE + len(part)
        if self._num_bytes > MAX_RECORD_BYTES:
            return self.remove()
        whole = len(part).to_bytes(_SIZE) + part
        try:
            if os.write(self._file, whole) != len(whole):
                raise OSError("it was written in part")
        except OSError as error:  # the disk is full, for example: the stream goes on, and ends with this process
            log.warning("stream %s cannot be kept for other API processes: %s", self.id, error.strerror or error)
            self.remove()
        return None


class StreamRecords:
    """The records that this process has locked. Keeps none until it is opened."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.by_request: dict[str, StreamRecord] = {}  # by the engine's request; those of other streams are not in it

    def open(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, stream_id: str, head: RecordHead) -> StreamRecord | None:
        """Make a record. None: this stream cannot be recorded."""
        if self._folder is None or not _ID.fullmatch(stream_id):
            return None
        path = self._folder / (_PREFIX + stream_id)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
        except OSError as error:
            log.warning("stream %s cannot be kept for other API processes: %s", stream_id, error.strerror or error)
            return None
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = StreamRecord(path, file, head, [], 0)
        record._append(_encode(head))
        return record

    def attach(self, record: StreamRecord, request_id: str) -> None:
        """The stream's tokens are those of this request."""
        self.by_request[request_id] = record

    def forget(self, record: StreamRecord) -> None:
        self.by_request = {name: each for name, each in self.by_request.items() if each is not record}

    def remove(self, record: StreamRecord) -> None:
        """The stream can no longer be resumed."""
        self.forget(record)
        record.remove()

    def claim(self, stream_id: str, may_see: Callable[[bytes], bool]) -> StreamRecord | None:
        """The record of a stream whose process has ended. None: there is none, or another process has it. `may_see`:
        whether who asks may see what this owner has made."""
        if self._folder is None or not _ID.fullmatch(stream_id):
            return None
        path = self._folder / (_PREFIX + stream_id)
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = _read(path, file) if os.fstat(file).st_nlink else None
            if found is not None and may_see(found.head.owner):
                return found
        except OSError:
            pass
        os.close(file)
        return None

    def has(self, stream_id: str) -> bool:
        """Whether there is a record, of this process or another."""
        return (
            self._folder is not None
            and bool(_ID.fullmatch(stream_id))
            and (self._folder / (_PREFIX + stream_id)).exists()
        )

    async def sweep(self, seconds: float) -> None:
        """Remove records that no process has had for so long. Runs until it is cancelled."""
        while seconds:
            await asyncio.sleep(max(MIN_SWEEP_SECONDS, seconds))
            self.remove_old(seconds)

    def remove_old(self, seconds: float) -> None:
        for path in [] if self._folder is None else self._folder.glob(_PREFIX + "*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > seconds:
                    record = self.claim(path.name.removeprefix(_PREFIX), lambda owner: True)
                    if record is not None:
                        record.remove()


def _read(path: Path, file: int) -> StreamRecord | None:
    """None: the process ended before it had written the request, or the file is damaged."""
    content = bytearray()
    while part := os.pread(file, 2**20, len(content)):
        content += part
    parts: list[bytes] = []
    at = 0
    while at + _SIZE <= len(content):
        end = at + _SIZE + int.from_bytes(content[at : at + _SIZE])
        if end > len(content):  # it ended while it wrote this one
            break
        parts.append(bytes(content[at + _SIZE : end]))
        at = end
    os.ftruncate(file, at)
    try:
        head = msgspec.msgpack.decode(parts[0], type=RecordHead)
        found = [_decode_part.decode(each) for each in parts[1:] if each != _ATTEMPT]
    except (IndexError, ValueError, RecursionError):  # of msgspec, and where a text is not UTF-8
        return None
    record = StreamRecord(path, file, head, [each for each in found if isinstance(each, list)], at)
    record.was_admitted = True
    record.charges = [each for each in found if isinstance(each, Charge)][-1:]
    record.num_attempts = next(count for count, each in enumerate(reversed(parts)) if each != _ATTEMPT)
    return record
