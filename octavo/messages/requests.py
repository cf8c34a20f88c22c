"""What API processes, the engine and its clients say to each other: requests, aborts, deltas, reports.
Requests' wishes are in params.py, what ranks are told in plans.py."""

import hashlib
import struct
from typing import Literal

import msgspec

from octavo.messages.params import PoolingParams, SamplingParams
from octavo.messages.plans import DeviceMemory, Logprobs

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


# ── API process → engine ────────────────────────────────────────────────────────────────────────────


class GenerateRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One prompt to continue. Lengths, ranges and the model's name were checked before it was made."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams  # seed and max_tokens are set
    stop_ids: list[int]  # sampling one of these ends the request: end-of-sequence ids and stop_token_ids
    origin: int = 0  # the API process its tokens go back to
    arrived: float = 0.0  # CLOCK_MONOTONIC seconds at which the server received it
    pooling: PoolingParams | None = None  # a vector of the prompt is wanted, in place of tokens; max_tokens is 1 then
    is_whole: bool = False  # all of the prompt must be computed in one step, and nothing of it come from a cache
    wants_progress: bool = False  # deltas shall tell how far the prompt is computed
    submitted: float = 0.0  # CLOCK_MONOTONIC seconds: the order of arrival, whichever API process it came through
    begun: list[list[int] | None] = []  # it outlived an engine: tokens that each choice has so far; None: it has ended
    strikes: int = 0  # engines that ended while it ran and since which it has not moved on
    http_id: str = ""  # the HTTP request that it belongs to
    deadline: float = 0.0  # CLOCK_MONOTONIC seconds at which it is ended, done or not; 0: never
    queue_until: float = 0.0  # … at which it is ended if it has no row yet; 0: never
    priority: int = 0  # lower goes first, where the engine schedules by priority; else 0


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The client is gone, or a stop string was found: free rows and pages. No more deltas of it will come."""

    request_id: str
    index: int = -1  # which of the n choices; −1: all that are left
    reason: FinishReason = "abort"  # "stop": a stop string was found


class LeaveQueue(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A request has waited for as long as it wanted to. If it never had a row, it ends, with cause "overload"."""

    request_id: str


class Hello(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An API process introduces itself; the engine answers with its EngineReport once it is ready."""

    origin: int
    reply_to: str  # address at which it listens for deltas
    survivors: list[GenerateRequest] = []  # what an earlier engine had not finished
    newcomers: list[GenerateRequest] = []  # what no engine has taken in


class ServerGone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The supervisor's word to an engine: an API process has ended, and nobody waits for what it asked."""

    origin: int
    reply_to: str  # where it listened: its successor listens elsewhere


class ReadMetrics(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with the Prometheus text of the engine's registry."""

    call: int
    origin: int = 0


class Ping(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered by the step loop itself, between two steps: proof that it turns."""

    call: int
    origin: int = 0


class ReadProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with an octavo.engine.progress.Progress as JSON: who waits, for what and how long."""

    call: int
    origin: int = 0


class ReadPlace(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with "POSITION SECONDS" of a request in the queue: 1 is the head, and when it may have a row. "": it is not there."""

    call: int
    request_id: str
    origin: int = 0


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Forget every published page. Answered with the number of pages forgotten."""

    call: int
    origin: int = 0


class ReadJourneys(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with the journeys, as JSON (observe/journeys/journey.py), of one request or of those in a state, latest first."""

    call: int
    origin: int = 0
    request_id: str = ""  # its own id, or that of its HTTP request; empty: every one
    state: str = ""  # empty: whatever it is
    limit: int = 100
    is_raw: bool = False  # only what is not over, as EngineJourneys (observe/journeys/stages.py)


class Answered(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An API process has answered an HTTP request. The engine process keeps what is known of it, for all of them."""

    ids: list[str]  # the HTTP request's, and those of its GenerateRequests
    method: str
    handler: str  # the route's pattern
    status: int
    seconds: float
    journey: bytes = b""  # JSON (observe/journeys/journey.py); empty: there is nothing to tell
    stages: dict[str, float] = {}  # seconds; empty: it is none of those that are shown as ended
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    at: float = 0.0  # when it was over, CLOCK_MONOTONIC
    is_old: bool = False  # an engine before this one was told so too, and counted it


class ReadLive(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with the engine as it is now: a LiveState (observe/live_state.py), as JSON."""

    call: int
    origin: int = 0
    since: int = -1  # number of the last ended request that was heard of; −1: nothing was, nor of the minutes before


class ReadPage(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with a JSON list of the requests that hold a page."""

    call: int
    page: int
    origin: int = 0


Control = ReadMetrics | ReadProgress | ReadPlace | Ping | ResetPrefixCache | ReadJourneys | ReadLive | ReadPage
ToEngine = GenerateRequest | Abort | LeaveQueue | Hello | ServerGone | Answered | Control


# ── engine → API process ────────────────────────────────────────────────────────────────────────────


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Why a choice ended, and what it cost."""

    reason: FinishReason
    stop_token: int | None = None  # the stop id that was sampled, when that was the reason
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    message: str | None = None  # with reason "error": what happened
    cause: Literal["fault", "overload", "deadline"] = "fault"  # … and whose doing it was
    retry_after: int = 0  # seconds, with cause "overload"
    cumulative_logprob: float | None = None  # of all tokens of a beam


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a prompt is computed."""

    num_computed: int  # of its tokens, those among them that the prefix cache had
    num_cached: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one choice of one request. A failure travels here too, as `finish`."""

    request_id: str
    index: int  # which of the n choices
    token_ids: list[int]
    finish: Finish | None = None
    vector: bytes = b""  # where pooling was asked for: float32, little endian
    logprobs: tuple[Logprobs, ...] = ()  # one for each token, where asked for
    # With the first token, where asked for: of each prompt token but the first.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    progress: Progress | None = None  # where asked for: with each step over the prompt, in a delta without tokens


def numbers_of(vector: bytes) -> list[float]:
    """A TokenDelta's vector as numbers."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


class StepDeltas(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Everything one step produced for one API process."""

    deltas: list[TokenDelta]


class Travelled(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A request's way through the engine, sent before its last tokens are."""

    journey: bytes  # an EngineJourney (observe/journeys/stages.py), as msgpack


class Reply(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to a Control."""

    call: int
    body: str


class EngineReport(msgspec.Struct, frozen=True, tag=True, gc=False):
    """What a client may count on, sent when the engine is ready. All sizes are per engine, summed over ranks."""

    device: str  # in words: "cpu (2 threads)"
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int  # tokens a page holds
    num_pages: int
    num_host_pages: int  # swap space
    weights_bytes: int
    page_bytes: int
    notes: list[str] = []  # what `auto` decided, in words, for the start-up print
    memory: DeviceMemory | None = None  # summed over ranks; None: there is no GPU
    kv_dtype: str = ""  # what KV pages hold; empty: dtype
    hidden_size: int = 0  # numbers in an embedding
    can_generate: bool = True  # False: an encoder, which gives embeddings and keeps no pages
    num_warm_pages: int | None = None  # cached pages alone do not take memory beyond these; None: all is taken already
    windows: tuple[int, ...] = (
        0,
    )  # of each group of layers, which has a page table of its own; 0: it keeps everything
    scheduling_policy: str = "fcfs"
    fingerprint: dict[str, str] = {}  # what the bits of answers depend on, part by part: the same parts, the same bits

    @property
    def system_fingerprint(self) -> str:
        """The parts in short: OpenAI's field of that name."""
        digest = hashlib.sha256(msgspec.json.encode(self.fingerprint, order="deterministic")).hexdigest()
        return f"octavo-{self.fingerprint.get('numerics', '0')}-{digest[:12]}"


class Dying(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine is about to end. Whoever has no supervisor fails every open request with this message."""

    message: str


FromEngine = StepDeltas | Travelled | Reply | EngineReport | Dying


# ── supervisor → API process ────────────────────────────────────────────────────────────────────────


class EngineLost(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine has ended, and another will be started: open requests wait for it."""

    message: str
    seated: list[str]  # requests that held a row: one of them may have been the cause


class EngineStarted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A new engine loads. It is to be told what there is to go on with, by a Hello."""

    engine_address: str
    reply_address: str


class EngineGone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """There will be no other engine: every open request fails with this message."""

    message: str


FromSupervisor = EngineLost | EngineStarted | EngineGone
