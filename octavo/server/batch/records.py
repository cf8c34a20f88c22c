"""The records that a batch writes, one line for each request with its answer or error, in OpenAI's format. They are read back
when a batch is resumed."""

import io
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from octavo.errors import ConfigError
from octavo.server.batch.lines import BadLine, Line
from octavo.server.state.loopback import LoopbackResponse

RECORD_START = b'{"id":"batch_req_'


class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    line: int | None = None  # line number in the input, if the line has no usable custom_id


class Record(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: Response | None
    error: Fault | None


class RecordWithIgnored(Record, frozen=True):
    ignored_fields: tuple[str, ...]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    """Usage of an answer. Each API has its own field names; absent ones are 0."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _ResponseBody(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Written(msgspec.Struct, frozen=True):
    """A record as it is read back."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Fault | None


class Tally(msgspec.Struct):
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def count(self, record: Record | _Written) -> None:
        if record.response is None or record.response.status_code >= 300:
            self.failed += 1
            return
        self.completed += 1
        try:
            usage = msgspec.json.decode(record.response.body, type=_ResponseBody).usage
        except msgspec.MsgspecError:  # an answer with another kind of usage
            return
        if usage is None:
            return
        self.input_tokens += usage.prompt_tokens + usage.input_tokens
        self.output_tokens += usage.completion_tokens + usage.output_tokens
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            self.cached_tokens += (details.cached_tokens or 0) if details else 0
        for details in (usage.completion_tokens_details, usage.output_tokens_details):
            self.reasoning_tokens += (details.reasoning_tokens or 0) if details else 0


def response_record(line: Line, reply: LoopbackResponse) -> Record:
    body = reply.body
    if b"\n" in body:  # a record is one line
        body = msgspec.json.encode(msgspec.json.decode(body))
    response = Response(reply.status, reply.request_id, msgspec.Raw(body))
    if line.ignored:
        return RecordWithIgnored(_new_id(), line.custom_id, response, None, line.ignored)
    return Record(_new_id(), line.custom_id, response, None)


def bad_line_record(bad: BadLine) -> Record:
    return Record(_new_id(), bad.custom_id, None, Fault(bad.code, bad.message, bad.number))


def unanswered_record(line: Line | BadLine, code: str, message: str) -> Record:
    number = line.number if line.custom_id is None else None  # the only identification of a line without a custom_id
    return Record(_new_id(), line.custom_id, None, Fault(code, message, number))


def encode_record(record: Record) -> bytes:
    text = msgspec.json.encode(record) + b"\n"
    assert text.startswith(RECORD_START)
    return text


def _new_id() -> str:
    return "batch_req_" + os.urandom(12).hex()


class Seen:
    """The set of custom_ids, and of the numbers of bad lines, that have been seen. It is on disk beyond a few MB, so that it can
    hold millions, and is removed when closed."""

    def __init__(self) -> None:
        # An empty name: a temporary file that SQLite removes itself. One thread at a time uses it, not always the same one: lines
        # are read in another thread than records are written.
        self._lock = threading.Lock()
        self._connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute("CREATE TABLE seen (key TEXT PRIMARY KEY) WITHOUT ROWID")
        self._connection.execute("BEGIN")

    def add(self, key: str | int) -> bool:
        """Add a key. False: it was there already."""
        with self._lock:
            cursor = self._connection.execute("INSERT OR IGNORE INTO seen VALUES (?)", (_key(key),))
            return cursor.rowcount == 1

    def note(self, record: Record | _Written) -> None:
        """Mark this record's line as answered."""
        if record.custom_id is not None:
            self.add(record.custom_id)
        elif record.error is not None and record.error.line is not None:
            self.add(record.error.line)

    def __contains__(self, key: str | int) -> bool:
        with self._lock:
            return self._connection.execute("SELECT 1 FROM seen WHERE key = ?", (_key(key),)).fetchone() is not None

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _key(key: str | int) -> str:
    return f"line {key}" if isinstance(key, int) else f"id {key}"


class _RecordFile(io.BufferedRandom):
    """A file that reads through a buffer but writes at once, so that no record is lost when this process ends. A record is
    written completely or not at all."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        start, num_written = self.tell(), 0
        try:
            while num_written < len(data):
                num_written += os.pwrite(self.fileno(), data[num_written:], start + num_written)
        except OSError:  # the disk is full, for example
            os.ftruncate(self.fileno(), start)
            raise
        self.seek(start + num_written)
        return num_written


def open_records(path: Path | str) -> BinaryIO:
    """Open a file of records, for `read_back` and then for appending."""
    file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
    return cast(BinaryIO, _RecordFile(file))


def read_back(file: BinaryIO, name: str, seen: Seen, tally: Tally) -> None:
    """Read the records of an earlier run into `seen` and `tally`, and leave `file` at the position to append. An incomplete last
    line, of a run that was killed, is cut off. Raises ConfigError, without changing the file, if it holds anything else."""
    decode: Callable[[bytes], _Written] = msgspec.json.Decoder(_Written).decode
    end = 0
    for number, text in enumerate(file, 1):
        if not text.endswith(b"\n"):
            start = text[: len(RECORD_START)]
            if not RECORD_START.startswith(start):
                raise _not_records(name, number)
            break
        try:
            record = decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _not_records(name, number) from None
        seen.note(record)
        tally.count(record)
        end += len(text)
    file.truncate(end)
    file.seek(end)


def _not_records(name: str, number: int) -> ConfigError:
    return ConfigError(f"{name} line {number} is not a batch record: choose another output, or move that file away")
