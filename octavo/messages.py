"""Every type that crosses a process boundary; the wishes among them are defined in params.py.
Knows nothing of sockets, tensors or HTTP; all of it is msgspec structs of plain values."""

import struct
from typing import Literal

import msgspec

from octavo.config import MAX_LOGPROBS as MAX_LOGPROBS
from octavo.config import Config
from octavo.params import BeamSearchParams as BeamSearchParams
from octavo.params import Pooling as Pooling
from octavo.params import PoolingParams as PoolingParams
from octavo.params import RepetitionDetectionParams as RepetitionDetectionParams
from octavo.params import SamplingParams as SamplingParams
from octavo.params import StructuredOutputsParams as StructuredOutputsParams

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
    """Answered with the journeys, as JSON (observe/journeys.py), of one request or of those in a state, latest first."""

    call: int
    origin: int = 0
    request_id: str = ""  # its own id, or that of its HTTP request; empty: every one
    state: str = ""  # empty: whatever it is
    limit: int = 100
    is_raw: bool = False  # only what is not over, as EngineJourneys (observe/stages.py)


class Answered(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An API process has answered an HTTP request. The engine process keeps what is known of it, for all of them."""

    ids: list[str]  # the HTTP request's, and those of its GenerateRequests
    method: str
    handler: str  # the route's pattern
    status: int
    seconds: float
    journey: bytes = b""  # JSON (observe/journeys.py); empty: there is nothing to tell
    stages: dict[str, float] = {}  # seconds
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


class ReadLive(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with the engine as it is now: a LiveState (observe/live.py), as JSON."""

    call: int
    origin: int = 0
    since: int = 0  # number of the last ended request that was heard of


class ReadPage(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answered with a JSON list of the requests that hold a page."""

    call: int
    page: int
    origin: int = 0


Control = ReadMetrics | ReadProgress | ReadPlace | Ping | ResetPrefixCache | ReadJourneys | ReadLive | ReadPage
ToEngine = GenerateRequest | Abort | LeaveQueue | Hello | Answered | Control


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


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one position: the token that is there, then the likeliest in falling order, as many as were asked for."""

    rank: int  # of the token that is there: 1 is the likeliest
    token_ids: list[int]
    logprobs: list[float]  # never below -9999, which stands for impossible

    def cut_to(self, count: int) -> "Logprobs":
        """With at most so many of the likeliest."""
        return Logprobs(self.rank, self.token_ids[: 1 + count], self.logprobs[: 1 + count])


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

    journey: bytes  # an EngineJourney (observe/stages.py), as msgpack


class Reply(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to a Control."""

    call: int
    body: str


class DeviceMemory(msgspec.Struct, frozen=True, gc=False):
    """A GPU's memory in bytes, measured with the weights in and no pages yet. What is in none of these is free for pages."""

    total: int
    other: int  # held by other processes
    own: int  # held by this one: weights, tables, the context, what libraries keep
    working: int  # what the largest step takes beyond that, and gives back
    working_rows: int  # the same for a step of one token for each row
    working_least: int  # the same for a step of one token
    reserve: int  # left free on purpose: CUDA graphs, staging, rounding, what other processes may still take

    @property
    def for_pages(self) -> int:
        """What is free for pages, whatever share of the GPU was meant for them. Negative: not even a step fits."""
        return self.total - self.other - self.own - self.working - self.reserve


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


# ── executor ⇄ ranks, at start-up ───────────────────────────────────────────────────────────────────


class RankStart(msgspec.Struct, frozen=True, gc=False):
    """The first thing a spawned rank is told."""

    config: Config
    model_path: str
    model_name: str
    model_kind: Literal["folder", "gguf"]
    rank: int
    num_ranks: int
    rendezvous: str  # address at which the ranks meet


class LoadReport(msgspec.Struct, frozen=True, gc=False):
    """One rank has its weights and no pages yet. Sizes are this rank's own; memory shared by ranks is divided already."""

    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_model_len_is_auto: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_bytes: int
    page_bytes: int
    available_bytes: int  # for pages, where the device's memory is concerned
    host_available_bytes: int  # for the swap space; on a CPU the same memory as the pages'
    notes: list[str] = []
    memory: DeviceMemory | None = None  # None: there is no GPU
    fp8_weights_bytes: int = 0  # what the weights would take with --quantization fp8; 0: that cannot be chosen
    fp8_page_bytes: int = 0  # what a page would take with --kv-cache-dtype fp8; 0: that cannot be chosen
    kv_dtype: str = ""  # what KV pages hold; empty: dtype
    hidden_size: int = 0
    can_generate: bool = True
    windows: tuple[int, ...] = (
        0,
    )  # of each group of layers, which has a page table of its own; 0: it keeps everything


class Allocate(msgspec.Struct, frozen=True, gc=False):
    """What the executor settled on, the same for every rank."""

    num_pages: int
    num_host_pages: int


class RankFailed(msgspec.Struct, frozen=True, gc=False):
    """A rank's last words. `is_config`: a ConfigError's message, for a person; else a traceback."""

    is_config: bool
    message: str


# ── engine → workers ────────────────────────────────────────────────────────────────────────────────


class Entering(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row's new occupant, with all of its tokens known so far (a preempted request brings its output along)."""

    row: int
    token_ids: list[int]
    prompt_len: int  # the first of token_ids that came from the client
    params: SamplingParams
    seed: int  # already distinct for each of the n choices
    stop_ids: list[int]  # masked until min_tokens are out
    pages: list[list[int]]  # its page table in each group of layers; 0 where a window has passed
    pooling: PoolingParams | None = None  # in place of sampling: its hidden states become a vector


class PageMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy one page before the step. Moves are executed in list order; `host` pages live in the swap space."""

    kind: Literal["copy", "out", "in"]  # page → page, page → host page, host page → page
    source: int
    target: int


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row goes on with a token that it did not sample: a beam's next. What its pages hold up to there is told apart; the tokens
    before it in the row's table are no longer those, and nobody reads them."""

    row: int
    position: int
    token: int


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step, decided: the same bytes for every rank. Columns of equal length describe the rows that advance."""

    step: int
    leaves: list[int]  # rows whose occupant is gone
    enters: list[Entering]
    moves: list[PageMove]
    rows: list[int]  # ┐ row `rows[i]` computes positions
    starts: list[int]  # │ starts[i] … starts[i] + counts[i] − 1
    counts: list[int]  # │ and samples a token after the last of them
    samples: list[bool]  # ┘ if samples[i]
    page_rows: list[int]  # ┐ entry page_slots[j] of row page_rows[j]'s page table
    page_slots: list[int]  # │ becomes page_ids[j], before the step
    page_ids: list[int]  # ┘
    page_groups: list[int] = []  # … in the page table of group page_groups[j]; empty: there is one group
    turns: list[Turn] = []

    @property
    def is_empty(self) -> bool:
        """Nothing to carry out. (A plan may move pages and advance nobody.)"""
        return not self.rows and not self.moves


class Candidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The likeliest continuations of a beam, in falling order."""

    token_ids: list[int]
    logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What a step gave, in the order of the True ones in the plan's `samples`: a vector for each row that is pooled, a token
    for each of the others, logprobs of those tokens whose row wants them, and candidates of each row that is a beam."""

    step: int
    tokens: list[int]
    vectors: list[bytes] = []
    logprobs: list[Logprobs] = []
    # Of each row that wants them and computed prompt tokens, the last one aside.
    prompt_logprobs: list[list[Logprobs]] = []
    failures: dict[int, str] = {}  # which of `tokens` do not count, and why: their requests cannot go on
    grammar_seconds: float = 0.0  # that grammars took to say what may follow
    # Which of `tokens` end their requests a little before max_tokens: their grammars let them end there.
    last: list[int] = []
    candidates: list[Candidates] = []
