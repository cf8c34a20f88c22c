"""Messages between API processes, the engine and the supervisor: requests, aborts, deltas, reports.
params.py has the parameters of requests, plans.py the messages to ranks."""

import hashlib
import struct
from typing import Literal

import msgspec

from octavo.messages.fleet import FleetState, PageEvents, PageSnapshot
from octavo.messages.params import PoolingParams, SamplingParams
from octavo.messages.plans import DeviceMemory, Logprobs
from octavo.messages.prefixes import HoldPrefix, ReadPrefixes, ReleasePrefix
from octavo.messages.speculation import SpeculationSettings

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


# ── API process → engine ────────────────────────────────────────────────────────────────────────────


class AdapterRef(msgspec.Struct, frozen=True, gc=False):
    """An adapter as it was registered (decision 052)."""

    name: str
    path: str
    stamp: str = ""  # of its files; they must not change while it is registered. Empty: not checked
    max_rank: int = 256  # what --max-lora-rank allows
    num_weights: int = 0  # numbers that it holds in memory, all ranks together

    @property
    def key(self) -> str:
        """Which files these are, in which state. Equal keys have the same content on every replica."""
        return f"{self.path}\0{self.stamp}"


class AdapterLoaded(msgspec.Struct, frozen=True, gc=False):
    id: str  # a digest of its content: adapters with the same content are one. Empty: it is not loaded, because others are in its way
    num_bytes: int  # in memory


class GenerateRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One prompt to continue. Lengths, ranges and the model's name have been checked."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams  # seed and max_tokens are set
    stop_ids: list[int]  # sampling one of these ends the request: end-of-sequence ids and stop_token_ids
    origin: int = 0  # number of the API process that its tokens go to
    arrived: float = 0.0  # CLOCK_MONOTONIC seconds at which the server received it
    pooling: PoolingParams | None = None  # return a vector of the prompt instead of tokens; max_tokens is then 1
    needs_one_step: bool = False  # the whole prompt must be computed in one step, without the prefix cache
    wants_progress: bool = False  # send deltas that report how much of the prompt is computed
    submitted: float = 0.0  # CLOCK_MONOTONIC seconds: the order of arrival across all API processes
    begun: list[
        list[int] | None
    ] = []  # if it outlived an engine: tokens of each choice so far; None: the choice has ended
    strikes: int = 0  # engines that have ended while it ran, since it last made progress
    http_id: str = ""  # id of the HTTP request that it belongs to
    owner: bytes = b""  # of that HTTP request (server/state/owners.py); empty: the server has no keys
    deadline: float = 0.0  # CLOCK_MONOTONIC seconds at which it is ended, finished or not; 0: never
    queue_until: float = 0.0  # CLOCK_MONOTONIC seconds at which it is ended if it has no row yet; 0: never
    priority: int = 0  # lower runs first if the engine schedules by priority; else 0
    tenant: int = 0  # number of what it shares a part of the engine with (--fairness): its key's, as a rule
    weight: float = 1.0  # of that part
    response_id: str = ""  # id of the response that it is a part of; empty: its own, it is the only part
    part: int = 0  # its number among the requests of that response
    adapter: AdapterRef | None = None  # what its answers are computed with; None: the base model alone
    session: str = ""  # the conversation that it is a turn of, within its owner's; empty: it has no name
    retain_seconds: float = 0.0  # after its end, for which its pages are evicted last; 0: as all others
    num_expected: int = (
        0  # prompt tokens that a router expects in the prefix cache; counts the replica's work, and steers no plan
    )


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The client has disconnected, or a stop string was found: free rows and pages. No more deltas follow."""

    request_id: str
    index: int = -1  # which of the n choices; −1: all that still run
    reason: FinishReason = "abort"  # "stop": a stop string was found; "length": its key's budget is used up


class LeaveQueue(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A request's queue timeout has passed. If it never had a row, it ends with cause "overload"."""

    request_id: str


class Hello(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Sent by an API process when it connects; the engine replies with its EngineReport once it is ready."""

    origin: int
    reply_to: str  # address at which it listens for deltas
    survivors: list[GenerateRequest] = []  # requests that an earlier engine had not finished
    newcomers: list[GenerateRequest] = []  # requests that no engine has received


class WantSnapshot(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Sent by a router that has lost events: the engine answers with a PageSnapshot."""

    origin: int


class ServerGone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Sent by the supervisor: an API process has ended, and its requests are no longer wanted."""

    origin: int
    reply_to: str  # the address at which it listened; its successor has another


class ReadMetrics(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for the Prometheus text of the engine's registry."""

    call: int
    origin: int = 0


class Ping(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for a reply from the step loop itself, between two steps: proof that it runs."""

    call: int
    origin: int = 0


class ReadProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for an octavo.engine.progress.Progress as JSON: which requests wait, for what and how long."""

    call: int
    origin: int = 0
    owner: bytes | None = None  # name only requests of this owner; None: of all


class ReadPlace(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for a request's place in the queue: "POSITION SECONDS", where 1 is the head and SECONDS the estimated wait for a row.
    "" if it is not in the queue."""

    call: int
    request_id: str
    origin: int = 0


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Clear the prefix cache. The reply is the number of pages that it held."""

    call: int
    origin: int = 0


class SleepEngine(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Give back the memory of KV pages, and a GPU's memory of the weights, as soon as no request is open. The reply comes then. The next
    request wakes the engine."""

    call: int
    origin: int = 0


class WakeEngine(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Be ready for requests again. Calls that wait for the engine to sleep are answered with AWAKE."""

    call: int
    origin: int = 0


class ReadSleep(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask whether the engine sleeps. The reply to this, and to the two above: ASLEEP or AWAKE."""

    call: int
    origin: int = 0


ASLEEP, AWAKE = "asleep", "awake"


class ReadJourneys(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for journeys as JSON (observe/journeys/journey.py), of one request or of all in a state, latest first."""

    call: int
    origin: int = 0
    request_id: str = ""  # a request's id, or its HTTP request's; empty: all requests
    state: str = ""  # empty: any state
    limit: int = 100
    is_raw: bool = False  # only unfinished requests, as EngineJourneys (observe/journeys/stages.py)
    owner: bytes | None = None  # only requests of this owner; None: of all


class Responded(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An API process has answered an HTTP request. The engine process stores its record for all API processes."""

    ids: list[str]  # ids of the HTTP request and of its GenerateRequests
    method: str
    handler: str  # the route's pattern
    status: int
    seconds: float
    journey: bytes = b""  # JSON (observe/journeys/journey.py); empty: none
    stages: dict[str, float] = {}  # seconds by stage; empty: not listed among the finished requests
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    at: float = 0.0  # CLOCK_MONOTONIC seconds at which it ended
    is_old: bool = False  # an earlier engine has received and counted it
    owner: bytes = b""  # as in GenerateRequest
    jobs: dict[str, int] = {}  # how its jobs of compiling a grammar or template ended → how many
    cached_tokens: int = 0  # of its first prompt: found in the prefix cache …
    cache_miss: str = ""  # … and why no more
    differs_at: int | None = None  # … and from which token on it differs from earlier ones; None: not known


class ReadLive(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for the engine's current state: a LiveLook (observe/live_state.py) as JSON."""

    call: int
    origin: int = 0
    since: int = -1  # number of the last finished request already received; −1: none


class ReadHistory(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for what this engine and its predecessors did: a LiveHistory (observe/live_state.py) as JSON."""

    call: int
    seconds: float  # how far back
    origin: int = 0


class ReadPage(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for a JSON list of the requests that hold a page."""

    call: int
    page: int
    origin: int = 0
    owner: bytes | None = None  # only requests of this owner; None: of all


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Read an adapter into memory ahead of requests. The reply, when that is done, is empty, or says why it cannot be used."""

    call: int
    adapter: AdapterRef
    origin: int = 0


Control = (
    ReadMetrics
    | ReadProgress
    | ReadPlace
    | Ping
    | ResetPrefixCache
    | ReadJourneys
    | ReadLive
    | ReadHistory
    | ReadPage
    | LoadAdapter
    | HoldPrefix
    | ReleasePrefix
    | ReadPrefixes
    | SleepEngine
    | WakeEngine
    | ReadSleep
)
ToEngine = GenerateRequest | Abort | LeaveQueue | Hello | WantSnapshot | ServerGone | Responded | Control


# ── engine → API process ────────────────────────────────────────────────────────────────────────────


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Why a choice ended, and its totals."""

    reason: FinishReason
    stop_token: int | None = None  # the stop id that was sampled, if that ended it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    message: str | None = None  # with reason "error": what happened
    cause: Literal["fault", "overload", "deadline", "grammar", "adapter"] = (
        "fault"  # with reason "error": the kind of error
    )
    retry_after: int = 0  # seconds, with cause "overload"
    cumulative_logprob: float | None = None  # sum over all tokens of a beam
    num_drafted_tokens: int = 0  # tokens that were drafted for it (decision 048) …
    num_accepted_tokens: int = 0  # … and those of them that are in its output
    is_budget: bool = False  # with reason "length": its key has used up its tokens of the day


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of a prompt is computed."""

    num_computed: int  # prompt tokens computed or found in the prefix cache
    num_cached: int  # those of num_computed that were found in the prefix cache


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one choice of one request. A failure travels here too, as `finish`."""

    request_id: str
    index: int  # which of the n choices
    token_ids: list[int]
    finish: Finish | None = None
    vector: bytes = b""  # if pooling was requested: float32, little endian
    logprobs: tuple[Logprobs, ...] = ()  # one for each token, if requested
    # If requested: one for each prompt token but the first, after each step over the prompt, in deltas without tokens; the rest
    # with the first token. An engine that replaces another sends them from the first on.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    progress: PrefillProgress | None = None  # if requested: after each step over the prompt, in a delta without tokens
    num_scored: int = 0  # how many prompt_logprobs were sent before these

    def add_scores_to(self, known: list[Logprobs]) -> None:
        """Add this delta's logprobs of the prompt to those of earlier deltas."""
        if self.prompt_logprobs:
            known[self.num_scored :] = self.prompt_logprobs


def numbers_of(vector: bytes) -> list[float]:
    """Decode a TokenDelta's vector."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


class StepDeltas(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Everything one step produced for one API process."""

    deltas: list[TokenDelta]


class Travelled(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine's part of a request's journey, sent before the request's last tokens."""

    journey: bytes  # an EngineJourney (observe/journeys/stages.py), as msgpack


class Reply(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The reply to a Control."""

    call: int
    body: str


class EngineReport(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine's properties and limits, sent when it is ready. All sizes are per engine, summed over ranks."""

    device: str  # for people, for example "cpu (2 threads)"
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
    notes: list[str] = []  # what `auto` decided, one sentence each, printed at start-up
    memory: DeviceMemory | None = None  # summed over ranks; None: there is no GPU
    kv_dtype: str = ""  # element type of KV pages; empty: dtype
    hidden_size: int = 0  # numbers in an embedding
    num_labels: int = 0  # of the classification head; 0: there is none
    can_generate: bool = True  # False: an encoder, which gives embeddings and keeps no pages
    num_warm_pages: int | None = (
        None  # cached pages alone take no memory beyond these; None: all memory is taken already, and is never given back
    )
    windows: tuple[int, ...] = (
        0,
    )  # window of each group of layers with its own page table; 0: the group keeps all pages
    scheduling_policy: str = "fcfs"
    is_fair: bool = False  # requests have tenants, which are served in proportion to their weights
    max_inter_token_ms: float | str = 0  # as the flag; 0: no limit
    speculation: SpeculationSettings | None = None  # None: no request drafts
    draft_seconds: float = 0.0  # as one_row_seconds, of a pass of the draft model
    draft_len: int = 0  # tokens of a request up to which the draft model can follow it; 0: there is none
    draft_method: str = ""  # how it drafts; empty: as --speculative-config says
    verify_seconds: float = 0.0  # as one_row_seconds, of a row that verifies VERIFY_TOKENS − 1 drafted tokens
    one_row_seconds: float = 0.0  # what a step of one row and one token took before the first request; 0: not measured
    fingerprint: dict[str, str] = {}  # everything that the bits of an output depend on: equal parts give equal bits
    replica: int = 0  # its number in a fleet
    epoch: int = 0  # counts the engines of a fleet: a replica's next one has a higher number
    adapter_bytes: int = 0  # memory for adapters; 0: there are none (--enable-lora)
    prefix_eviction: str = "lru"  # as the flag; recordings from before decision 057 do not have it
    num_stages: int = (
        1  # that a plan goes through (pipeline parallelism); as many plans are in flight while the next is made
    )

    @property
    def system_fingerprint(self) -> str:
        """A hash of the fingerprint, for OpenAI's field of that name."""
        digest = hashlib.sha256(msgspec.json.encode(self.fingerprint, order="deterministic")).hexdigest()
        return f"octavo-{self.fingerprint.get('numerics', '0')}-{digest[:12]}"


class Dying(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine is about to end. A client without a supervisor fails every open request with this message."""

    message: str


FromEngine = StepDeltas | Travelled | Reply | EngineReport | Dying | PageEvents | PageSnapshot


# ── supervisor → API process ────────────────────────────────────────────────────────────────────────


class EngineLost(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine has ended and will be restarted: open requests wait for the new one, or go on at other replicas."""

    message: str
    seated: list[str]  # requests that held a row; one of them may have been the cause
    replica: int = 0
    suspects: list[str] = []  # those of `seated` that held a row in another replica when that ended, not long ago


class EngineStarted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A new engine is loading. API processes send it a Hello with their open requests."""

    engine_address: str
    reply_address: str
    replica: int = 0
    epoch: int = 0


class EngineGone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine will not be restarted: every open request fails with this message, unless another replica can continue it."""

    message: str
    replica: int = 0


class ReplicaDrains(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A replica gets no more requests. Those that are there may finish; after `seconds` the rest go on at other replicas. API processes
    answer with ReplicaIdle when none of theirs is left there."""

    replica: int
    epoch: int
    seconds: float


class FleetChanged(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The replicas as the supervisor sees them, whenever that changes."""

    state: FleetState


FromSupervisor = EngineLost | EngineStarted | EngineGone | ReplicaDrains | FleetChanged


# ── API process → supervisor, as lines of JSON on its standard output ───────────────────────────────


class ServerReady(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The API process accepts requests."""


class ReplicaIdle(msgspec.Struct, frozen=True, tag=True, gc=False):
    """No request of this API process is left at a replica that drains."""

    replica: int
    epoch: int


class ReplicaJoined(msgspec.Struct, frozen=True, tag=True, gc=False):
    """This API process is connected to a replica's engine and sends it requests."""

    replica: int
    epoch: int


class ScaleFleet(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A client wants so many replicas, or all of them started again one after the other."""

    replicas: int = 0  # 0: as many as there are
    restart: bool = False


ToSupervisor = ServerReady | ReplicaIdle | ReplicaJoined | ScaleFleet
