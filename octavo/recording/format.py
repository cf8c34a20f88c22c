"""The recording format: the scheduler's inputs as a stream of records, cut into chunks, with its state from time to time.

A chunk is a fixed header (magic, kind, position in the stream, length, checksum) and its content. Consecutive files can be joined
by concatenation. A reader skips a chunk that is incomplete and reports it."""

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
from octavo.schedule.step_costs import StepCosts

FORMAT = 2
_CHUNK = struct.Struct("<4sBQII")  # magic, kind, position in the stream, bytes, checksum
_MAGIC = b"oRec"
_STATE, _STREAM, _GAP = 0, 1, 2
_LENGTH = struct.Struct("<I")  # before every record of the stream


class Header(msgspec.Struct, frozen=True):
    """Describes the recorded engine. It never holds API keys, prompts or other settings of the server."""

    format: int
    version: str  # of octavo
    wall: float  # seconds since 1970 at the time of `clock`
    clock: float  # seconds of the records' clock
    engine: str  # number of the engine in its server
    with_tokens: bool  # token ids are recorded; otherwise only which pages are equal
    model: str
    model_path: str
    model_kind: str
    options: dict[str, dict[str, Any]]  # sections of the configuration
    report: EngineReport
    root: bytes  # the start of the chain of page keys; empty: not recorded


class State(msgspec.Struct, frozen=True):
    """A starting point: the stream can be replayed from here. Every segment begins with one."""

    header: Header
    scheduler: SchedulerState


# ── the stream ──────────────────────────────────────────────────────────────────────────────────────


class Arrived(msgspec.Struct, array_like=True, tag=1, gc=False):
    micros: int  # microseconds of the engine's clock, as in all records
    id: str
    prompt_len: int
    prompt_ids: list[int]  # empty: not recorded
    params: Wishes
    stop_ids: list[int]
    begun_len: list[int | None]
    begun: list[list[int] | None]  # empty: not recorded
    pooling: PoolingParams | None
    needs_one_step: bool
    wants_progress: bool
    priority: int
    received: int  # microseconds, when the server received it; 0: not known
    response_id: str = ""  # as in GenerateRequest; recordings from before decision 035 do not have it
    tenant: int = 0  # ┐ as in GenerateRequest
    weight: float = 1.0  # ┘
    owner: bytes = b""  # a name of it, as in RequestState; empty: there is none, or not recorded


class Aborted(msgspec.Struct, array_like=True, tag=2, gc=False):
    micros: int
    id: str
    index: int
    reason: FinishReason


class Forgotten(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The prefix cache was emptied."""

    micros: int


class Prepared(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A grammar has been compiled and can be used in steps."""

    micros: int
    grammar: str
    num_bytes: int = 0  # that it takes


class Costed(msgspec.Struct, array_like=True, tag=9, gc=False):
    """What steps were measured to cost. It limits the prompts in later plans."""

    micros: int
    costs: StepCosts


class Limited(msgspec.Struct, array_like=True, tag=10, gc=False):
    """The pages that may keep memory were limited, because memory was scarce, or no longer is."""

    micros: int
    num_warm: int


class LoadBegan(msgspec.Struct, array_like=True, tag=11, gc=False):
    """Pages were taken, to be filled from a tier."""

    micros: int
    ticket: int
    held: list[bytes]  # keys of the pages before them
    count: int


class LoadEnded(msgspec.Struct, array_like=True, tag=12, gc=False):
    """The first of these pages can be found by these keys; the others are free again."""

    micros: int
    ticket: int
    count: int
    keys: list[bytes]


class PrefixesHeld(msgspec.Struct, array_like=True, tag=13, gc=False):
    """Pages of these keys are evicted last from now on, and those of the others no more."""

    micros: int
    held: list[bytes]
    released: list[bytes]


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """The result of a step, as far as later plans depend on it."""

    micros: int  # duration of the step
    num_tokens: int  # computed in it
    tokens: list[int]  # sampled; empty: not recorded
    ended: list[tuple[str, int, FinishReason]]  # choices that this step's tokens ended
    last: list[int]
    failures: list[int]
    candidates: list[Candidates]
    late: list[int] = []  # of the sampled tokens: those that do not count, because a mask was late
    runs: list[int] = []  # for each draft of the step: how many tokens its row got, …
    taken: list[int] = []  # … and how many of them were taken in (Committed.taken)
    drafted: list[int] = []  # … and how many tokens the draft model had proposed; empty: as many as planned


class Stepped(msgspec.Struct, array_like=True, tag=4, gc=False):
    """One iteration of the loop: a plan was made, then the results of earlier steps were committed. If the oldest step that was in flight has
    drafts, its result was committed before the plan was made."""

    micros: int
    digest: int  # of the plan
    outcomes: list[Outcome]
    keys: bytes  # page keys in the order in which they were made; empty if tokens are recorded
    drafts: list[tuple[int, int]] = []  # of the plan: (index of the row, how many tokens it drafts)


class Ticked(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A run of ordinary iterations as columns: one outcome each, which only has a duration and a number of tokens."""

    micros: list[int]
    digests: list[int]
    step_micros: list[int]
    num_tokens: list[int]
    keys: bytes  # of all of these iterations

    def steps(self) -> "Iterator[Stepped]":
        columns = (self.micros, self.digests, self.step_micros, self.num_tokens)
        keys = self.keys
        for micros, digest_of_plan, step_micros, num_tokens in zip(*columns, strict=True):
            yield Stepped(micros, digest_of_plan, [Outcome(step_micros, num_tokens, [], [], [], [], [])], keys)
            keys = b""  # keys are consumed in order, so it does not matter which iteration carries them


class Marked(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A state was taken here."""

    micros: int


class Lost(msgspec.Struct, array_like=True, tag=6, gc=False):
    """Records were dropped because they came faster than they could be written. Nothing follows up to the next state."""

    micros: int


Record = (
    Arrived
    | Aborted
    | Forgotten
    | Prepared
    | Costed
    | Limited
    | LoadBegan
    | LoadEnded
    | PrefixesHeld
    | Stepped
    | Ticked
    | Marked
    | Lost
)
KEY_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


_WHOLE_EVERY = 16


def digest(plan: StepPlan, num_rows_before: int) -> int:
    """Checksum of a plan's decisions. In a steady plan (no row entered, left or moved, as in most) it covers only the number of
    rows and the new pages, because encoding all columns would cost more than the rest; the number of tokens is in the Outcome.
    All columns count in other plans and in every sixteenth. 0: the plan is empty and is not executed."""
    num_rows = len(plan.rows)
    if not num_rows and plan.is_empty:
        return 0
    is_steady = num_rows == num_rows_before and plan.step % _WHOLE_EVERY
    if is_steady and not (plan.enters or plan.leaves or plan.moves or plan.forced or plan.drafts):
        return (num_rows + 8191 * sum(plan.page_ids)) & 0xFFFFFFFF
    enters = [(enter.row, len(enter.token_ids), enter.prompt_len, enter.pages) for enter in plan.enters]
    forced = [(token.row, token.position) for token in plan.forced]
    pages = (plan.page_rows, plan.page_entries, plan.page_ids, plan.page_groups)
    columns: tuple[list[Any], ...] = (plan.rows, plan.starts, plan.counts, plan.samples)
    if plan.drafts:
        columns = (*columns, drafts_of(plan))
    return zlib.crc32(_encode((plan.step, plan.leaves, enters, plan.moves, columns, pages, forced)))


def drafts_of(plan: StepPlan) -> list[tuple[int, int]]:
    """As in Stepped."""
    return [(draft.at, len(draft.tokens)) for draft in plan.drafts]


# ── what is left out ────────────────────────────────────────────────────────────────────────────────

_NAMES, _DEFAULTS = SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__
_TEXT = {
    "stop", "stop_token_ids", "bad_words", "bad_word_ids", "structured_outputs", "logit_bias", "allowed_token_ids", "prediction_ids",
}  # fmt: skip


MAX_NAMED = 32 * 2**20  # characters of the grammars whose names are cached
_MAX_NAMES = 4096


def grammar_names() -> Callable[[str], str]:
    """Return a function that names a grammar without revealing it; the names differ between recordings. Names are cached,
    because a state asks for those of all open requests several times. The cache is bounded: old grammars may be in no use."""
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
    """The parameters that differ from their defaults. `with_text` False: without anything that a client wrote as text or that
    reveals it; a grammar is replaced by its name."""
    values = zip(_NAMES, msgspec.structs.astuple(params), _DEFAULTS, strict=True)
    kept = {name: value for name, value, default in values if value is not default and value != default}
    if not with_text:
        for name in kept.keys() & _TEXT:
            del kept[name]
        if "grammar" in kept:
            kept["grammar"] = name_of(kept["grammar"])
        if "prefix_salt" in kept:
            kept["prefix_salt"] = name_of(kept["prefix_salt"])
    return kept


def params_of(wishes: Wishes) -> SamplingParams:
    return msgspec.convert(wishes, SamplingParams)


def owner_names() -> Callable[[bytes], bytes]:
    """Return a function that names the owner of requests without revealing its key; the names differ between recordings."""
    secret = os.urandom(16)
    return lambda owner: blake2b(owner, key=secret, digest_size=8).digest() if owner else b""


def without_tokens(candidates: Candidates, stop_ids: Container[int]) -> Candidates:
    """Replace a beam's candidate tokens by -1, except the stop tokens. The logprobs stay."""
    return Candidates([token if token in stop_ids else -1 for token in candidates.token_ids], candidates.logprobs)


# ── chunks ──────────────────────────────────────────────────────────────────────────────────────────


def framed(record: bytes) -> bytes:
    return _LENGTH.pack(len(record)) + record


def state_chunk(state: bytes, position: int) -> bytes:
    return _CHUNK.pack(_MAGIC, _STATE, position, len(state), zlib.crc32(state)) + state


def gap_chunk(why: str, position: int) -> bytes:
    """A chunk that says why the stream is not in the file from here up to the next state."""
    content = why.encode()
    return _CHUNK.pack(_MAGIC, _GAP, position, len(content), zlib.crc32(content)) + content


def stream_chunk(records: bytes, position: int) -> bytes:
    return _CHUNK.pack(_MAGIC, _STREAM, position, len(records), zlib.crc32(records)) + records


class FileChunk(msgspec.Struct, frozen=True):
    kind: int
    position: int
    content: bytes

    @property
    def is_state(self) -> bool:
        return self.kind == _STATE

    @property
    def end(self) -> int:
        return self.position + len(self.content) if self.kind == _STREAM else self.position


def chunks_in(data: bytes) -> Iterator[FileChunk | int]:
    """Yield every complete chunk, and for bytes that are no complete chunk their number."""
    at = 0
    while at < len(data):
        if len(data) - at >= _CHUNK.size:
            magic, kind, position, length, checksum = _CHUNK.unpack_from(data, at)
            content = data[at + _CHUNK.size : at + _CHUNK.size + length]
            if magic == _MAGIC and kind <= _GAP and len(content) == length and zlib.crc32(content) == checksum:
                yield FileChunk(kind, position, content)
                at += _CHUNK.size + length
                continue
        found = data.find(_MAGIC, at + 1)
        end = len(data) if found < 0 else found
        yield end - at
        at = end


class Recording(msgspec.Struct):
    """A state and every record after it up to the end of the file."""

    state: State
    records: list[Record]
    notes: list[str]  # descriptions of what is missing

    @property
    def header(self) -> Header:
        return self.state.header


_decode_state = msgspec.msgpack.Decoder(State)
_decode_record: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def read(path: Path) -> Recording:
    """Read a recording: a file, or the folder that a running server writes to. Raises ConfigError if nothing in it can be
    replayed."""
    try:
        files = sorted(path.glob("*" + SEGMENT)) if path.is_dir() else [path]
        # Only the last engine's files: those of earlier engines are being made into crash files.
        files = [file for file in files if file.name.split("-")[0] == files[-1].name.split("-")[0]]
        data = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a recording of octavo serve") from None
    if _MAGIC not in data[:64]:
        what = "an empty folder or file" if not data else "not a recording of octavo serve"
        raise ConfigError(f"{path} is {what}: give the file that the log names, or a --record-folder's live-… folder")
    return _follow(path, list(chunks_in(data)))


SEGMENT = ".segment"


def _follow(path: Path, chunks: list[FileChunk | int]) -> Recording:
    """Decode the last stretch without a gap: it ends with the event that the reader wants to explain."""
    notes = [f"{chunk} bytes were not written completely and are skipped" for chunk in chunks if isinstance(chunk, int)]
    states: list[FileChunk] = []  # of the current stretch
    stream, end, num_gaps = bytearray(), -1, 0
    why = ""  # why the stream ends here, from a gap chunk
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
        raise ConfigError(f"{path} holds no state to start from: {why or 'it is only a part of a recording'}")
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
            records.extend(record.steps())
        else:
            records.append(record)
    if why:
        notes.append(f"the rest could not be recorded: {why}")
    if num_gaps:
        notes.append("some records could not be written: everything before the last gap is skipped")
    return Recording(_state_of(start, path), records, notes)


def _state_of(chunk: FileChunk, path: Path) -> State:
    try:
        state = _decode_state.decode(chunk.content)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was written by another version of octavo and cannot be read: {error}") from None
    if state.header.format != FORMAT:
        raise ConfigError(f"{path} has format {state.header.format}, this version reads {FORMAT}")
    return state


def _records(stream: bytes, start: int, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """Yield (end position in the stream, record). `start`: the position of the first of these bytes."""
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
            notes.append(f"a record cannot be read; all records after it are skipped: {error}")
            return
        yield start + at, record
    if at < len(stream):
        notes.append(f"the last {len(stream) - at} bytes are a record that was not written completely")
