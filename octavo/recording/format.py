"""What a recording holds, and how it lies in files: the scheduler's inputs as a stream of records, cut into chunks, and its state
now and then. Knows nothing of how a recording is made or of what it is read for.

A chunk is a line of numbers (what, where in the stream, how long, checksum) and its content. Files that follow one another can be
joined by writing them one behind the other. A chunk that was not written whole is passed over, and told."""

import os
import struct
import zlib
from collections.abc import Callable, Container, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.messages import Candidates, EngineReport, FinishReason, PoolingParams, SamplingParams, StepPlan
from octavo.schedule.snapshot import SchedulerState, Wishes

FORMAT = 2
_CHUNK = struct.Struct("<4sBQII")  # magic, kind, position in the stream, bytes, checksum
_MAGIC = b"oRec"
_STATE, _STREAM, _GAP = 0, 1, 2
_LENGTH = struct.Struct("<I")  # before every record of the stream


class Header(msgspec.Struct, frozen=True):
    """What the recorded engine was. Never keys, prompts or anything else of the server's settings."""

    format: int
    version: str  # of octavo
    wall: float  # seconds since 1970 at
    clock: float  # … this many seconds of the records' clock
    engine: str  # which of a server's engines
    with_tokens: bool  # token ids are told; else only which pages are alike
    model: str
    model_path: str
    model_kind: str
    options: dict[str, dict[str, Any]]  # sections of the configuration
    report: EngineReport
    root: bytes  # what pages' keys begin with; empty: not told


class State(msgspec.Struct, frozen=True):
    """The beginning of a file: from here on the stream can be followed."""

    header: Header
    scheduler: SchedulerState


# ── the stream ──────────────────────────────────────────────────────────────────────────────────────


class Arrived(msgspec.Struct, array_like=True, tag=1, gc=False):
    micros: int  # of the engine's clock
    id: str
    prompt_len: int
    prompt_ids: list[int]  # empty: not told
    params: Wishes
    stop_ids: list[int]
    begun_len: list[int | None]
    begun: list[list[int] | None]  # empty: not told
    pooling: PoolingParams | None
    is_whole: bool
    wants_progress: bool
    priority: int
    received: int  # microseconds at which the server had it; 0: not known


class Aborted(msgspec.Struct, array_like=True, tag=2, gc=False):
    micros: int
    id: str
    index: int
    reason: FinishReason


class Forgotten(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Every published page was withdrawn."""

    micros: int


class Prepared(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A grammar is ready where steps are computed."""

    micros: int
    grammar: str


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """What a step gave, as far as plans depend on it."""

    micros: int  # for which it was computed
    num_tokens: int  # that it computed
    tokens: list[int]  # sampled; empty: not told
    ended: list[tuple[str, int, FinishReason]]  # choices that this step's tokens ended
    last: list[int]
    failures: list[int]
    candidates: list[Candidates]


class Turned(msgspec.Struct, array_like=True, tag=4, gc=False):
    """One turn of the loop: a plan was made, then the outcomes of some older ones were taken in."""

    micros: int
    digest: int  # of the plan
    outcomes: list[Outcome]
    keys: bytes  # of pages, in the order in which they were made; empty: tokens are told


class Ticked(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A run of turns as most are: one outcome each, of which there is nothing to tell but what it cost."""

    micros: list[int]
    digests: list[int]
    step_micros: list[int]
    num_tokens: list[int]
    keys: bytes  # of all of them

    def turns(self) -> "Iterator[Turned]":
        columns = (self.micros, self.digests, self.step_micros, self.num_tokens)
        keys = self.keys
        for micros, digest_of_plan, step_micros, num_tokens in zip(*columns, strict=True):
            yield Turned(micros, digest_of_plan, [Outcome(step_micros, num_tokens, [], [], [], [], [])], keys)
            keys = b""  # they are asked for in their order, whichever turn they are told with


class Marked(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A state was taken here."""

    micros: int


class Lost(msgspec.Struct, array_like=True, tag=6, gc=False):
    """What followed was more than could be written: nothing more up to the next state."""

    micros: int


Record = Arrived | Aborted | Forgotten | Prepared | Turned | Ticked | Marked | Lost
KEY_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


_WHOLE_EVERY = 16


def digest(plan: StepPlan, num_rows_before: int) -> int:
    """A checksum of what a plan decides. Where nobody enters, leaves or moves, as in most plans, that is how many rows there are and which
    pages they get, for to write all columns down would cost more than the rest; and (an Outcome has it) how many tokens. All
    columns count in other plans, and in every sixteenth. 0: it is empty, and nobody hears of it."""
    num_rows = len(plan.rows)
    if not num_rows and plan.is_empty:
        return 0
    is_steady = num_rows == num_rows_before and plan.step % _WHOLE_EVERY
    if is_steady and not (plan.enters or plan.leaves or plan.moves or plan.forced):
        return (num_rows + 8191 * sum(plan.page_ids)) & 0xFFFFFFFF
    enters = [(enter.row, len(enter.token_ids), enter.prompt_len, enter.pages) for enter in plan.enters]
    turns = [(turn.row, turn.position) for turn in plan.forced]
    pages = (plan.page_rows, plan.page_slots, plan.page_ids, plan.page_groups)
    columns = (plan.rows, plan.starts, plan.counts, plan.samples)
    return zlib.crc32(_encode((plan.step, plan.leaves, enters, plan.moves, columns, pages, turns)))


# ── how much is told ────────────────────────────────────────────────────────────────────────────────

_NAMES, _DEFAULTS = SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__
_TEXT = {"stop", "stop_token_ids", "bad_words", "bad_word_ids", "structured_outputs", "logit_bias", "allowed_token_ids"}


MAX_NAMED = 32 * 2**20  # characters of grammars whose names are kept
_MAX_NAMES = 4096


def grammar_names() -> Callable[[str], str]:
    """Gives a grammar a name that tells nothing of it: another one in every recording. A state asks for those of all open requests,
    some times each, so what was made is kept; within a limit, for whoever was asked about may be long gone."""
    secret = os.urandom(16)
    names: dict[str, str] = {}
    num_kept = 0

    def name_of(grammar: str) -> str:
        nonlocal num_kept
        if (name := names.get(grammar)) is None:
            if num_kept + len(grammar) > MAX_NAMED or len(names) == _MAX_NAMES:
                names.clear()
                num_kept = 0
            name = names[grammar] = blake2b(grammar.encode(), key=secret, digest_size=8).hexdigest()
            num_kept += len(grammar)
        return name

    return name_of


def wishes_of(params: SamplingParams, with_text: bool, name_of: Callable[[str], str]) -> Wishes:
    """`with_text` False: nothing that a client wrote in words, or that tells of them. Of a grammar, a name is told."""
    values = zip(_NAMES, msgspec.structs.astuple(params), _DEFAULTS, strict=True)
    told = {name: value for name, value, default in values if value is not default and value != default}
    if not with_text:
        for name in told.keys() & _TEXT:
            del told[name]
        if "grammar" in told:
            told["grammar"] = name_of(told["grammar"])
    return told


def params_of(wishes: Wishes) -> SamplingParams:
    return msgspec.convert(wishes, SamplingParams)


def untold(candidates: Candidates, stop_ids: Container[int]) -> Candidates:
    """Which of a beam's continuations end it, and how likely each is; not what they say."""
    return Candidates([token if token in stop_ids else -1 for token in candidates.token_ids], candidates.logprobs)


# ── chunks ──────────────────────────────────────────────────────────────────────────────────────────


def framed(record: bytes) -> bytes:
    return _LENGTH.pack(len(record)) + record


def state_chunk(state: bytes, position: int) -> bytes:
    return _CHUNK.pack(_MAGIC, _STATE, position, len(state), zlib.crc32(state)) + state


def gap_chunk(why: str, position: int) -> bytes:
    """Nothing of what follows is in the file, up to the next state."""
    content = why.encode()
    return _CHUNK.pack(_MAGIC, _GAP, position, len(content), zlib.crc32(content)) + content


def stream_chunk(records: bytes, position: int) -> bytes:
    return _CHUNK.pack(_MAGIC, _STREAM, position, len(records), zlib.crc32(records)) + records


class Chunk(msgspec.Struct, frozen=True):
    kind: int
    position: int
    content: bytes

    @property
    def is_state(self) -> bool:
        return self.kind == _STATE

    @property
    def end(self) -> int:
        return self.position + len(self.content) if self.kind == _STREAM else self.position


def chunks_in(data: bytes) -> Iterator[Chunk | int]:
    """Every chunk that is whole; in place of what is none, how many bytes that was."""
    at = 0
    while at < len(data):
        if len(data) - at >= _CHUNK.size:
            magic, kind, position, length, checksum = _CHUNK.unpack_from(data, at)
            content = data[at + _CHUNK.size : at + _CHUNK.size + length]
            if magic == _MAGIC and kind <= _GAP and len(content) == length and zlib.crc32(content) == checksum:
                yield Chunk(kind, position, content)
                at += _CHUNK.size + length
                continue
        found = data.find(_MAGIC, at + 1)
        end = len(data) if found < 0 else found
        yield end - at
        at = end


class Recording(msgspec.Struct):
    """From a state on, every record up to the end of the file."""

    state: State
    records: list[Record]
    notes: list[str]  # what is missing, in words

    @property
    def header(self) -> Header:
        return self.state.header


_decode_state = msgspec.msgpack.Decoder(State)
_decode_record: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def read(path: Path) -> Recording:
    """A file, or the folder that a running server writes to. Raises ConfigError where there is nothing that can be followed."""
    try:
        files = sorted(path.glob("*" + SEGMENT)) if path.is_dir() else [path]
        # Of several engines, what those before the last one wrote is about to be files of their own.
        files = [file for file in files if file.name.split("-")[0] == files[-1].name.split("-")[0]]
        data = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a recording of octavo serve") from None
    if _MAGIC not in data[:64]:
        what = "an empty folder or file" if not data else "no recording of octavo serve"
        raise ConfigError(f"{path} is {what}: give the file that the log names, or a --record-folder's live-… folder")
    return _follow(path, list(chunks_in(data)))


SEGMENT = ".segment"


def _follow(path: Path, chunks: list[Chunk | int]) -> Recording:
    """The last stretch without a gap counts: that is the one that ends with what is asked about."""
    notes = [f"{chunk} bytes were not written whole and are passed over" for chunk in chunks if isinstance(chunk, int)]
    states: list[Chunk] = []  # of this stretch
    stream, end, num_gaps = bytearray(), -1, 0
    why = ""  # there is nothing more
    for chunk in chunks:
        if isinstance(chunk, int):
            continue
        if chunk.kind == _GAP:
            why = chunk.content.decode(errors="replace")
            continue
        if chunk.is_state:
            why = ""
        if chunk.is_state and (not states or chunk.position > end):
            num_gaps += bool(states)
            states, stream, end = [chunk], bytearray(), chunk.position
        elif chunk.is_state:
            states.append(chunk)
        elif states and chunk.position <= end:
            stream += chunk.content[end - chunk.position :]
            end, why = max(end, chunk.end), ""
        elif states:
            num_gaps += 1
            states = []
    if not states:
        raise ConfigError(f"{path} holds no state to begin with: {why or 'it is only a part of a recording'}")
    records: list[Record] = []
    start = states[0]
    for position, record in _records(bytes(stream), states[0].position, notes):
        if isinstance(record, Lost):
            num_gaps += 1
            start = next((state for state in states if state.position >= position), start)
            if start.position < position:
                break
            records = []
        elif isinstance(record, Ticked):
            records.extend(record.turns())
        else:
            records.append(record)
    if why:
        notes.append(f"what followed could not be recorded: {why}")
    if num_gaps:
        notes.append("some of it could not be written: what is before the last gap is passed over")
    return Recording(_state_of(start, path), records, notes)


def _state_of(chunk: Chunk, path: Path) -> State:
    try:
        state = _decode_state.decode(chunk.content)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was written by another version of octavo, and cannot be followed: {error}") from None
    if state.header.format != FORMAT:
        raise ConfigError(f"{path} has format {state.header.format}, this version reads {FORMAT}")
    return state


def _records(stream: bytes, start: int, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """(where it ends in the stream, record). `start`: where these bytes begin."""
    at = 0
    while at + _LENGTH.size <= len(stream):
        (length,) = _LENGTH.unpack_from(stream, at)
        content = stream[at + _LENGTH.size : at + _LENGTH.size + length]
        if len(content) < length:
            break
        at += _LENGTH.size + length
        try:
            record = _decode_record.decode(content)
        except msgspec.MsgspecError as error:
            notes.append(f"a record cannot be read, and all after it is passed over: {error}")
            return
        yield start + at, record
    if at < len(stream):
        notes.append(f"the last {len(stream) - at} bytes are a record that was not written whole")
