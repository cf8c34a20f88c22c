"""Stages: the record of a request's way through engine and server, consecutive stages on one clock. Times are CLOCK_MONOTONIC seconds,
the same in all processes of a machine."""

from typing import Literal

import msgspec

WaitReason = Literal["grammar", "rows", "pages", "budget", "streams", "order", "turn", "step"]
"""What a request in the queue waits for: its grammar to be compiled, a free row, free pages, room in the step's token
budget, time that the step may take beside running streams (--max-inter-token-ms), earlier requests (order), sequences
of other requests that go first because this is not the first of its own (turn), or only the end of the running step."""
StageName = Literal[
    "model",  # in the gateway of several models: its model was loaded
    "receive", "parse", "tokenise", "hand_over", "before",  # in the API process; before: seen from the engine alone
    "adapter",  # in the engine, before the queue: its adapter was read into memory, or waited for memory
    "load",  # in the engine, before the queue: KV pages came from a tier
    "queue", "prefill", "decode", "preempted", "recompute", "several", "engine",  # in the engine; engine: its own stages are not known
    "restart",  # the engine had ended, and another was started
    "detokenise", "flush", "answer",  # in the API process, after
]  # fmt: skip

MAX_CHUNKS = 24
MAX_STAGES = 48
FOLD_AT = 24


class Wait(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Time in the queue for one reason. While it waited for other requests (order, turn), `behind` says what the head lacked."""

    reason: WaitReason
    seconds: float
    steps: int = 0
    behind: dict[str, float] = {}


class Chunk(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One step's share of a prompt: tokens start … start + tokens − 1."""

    step: int
    start: int
    tokens: int
    seconds: float  # from its plan to its commit; steps overlap, so these may sum to more than the stage
    merged: int = 0  # how many further chunks are counted in this one
    # It was cut so that running streams get their next token within so many milliseconds; 0: it was not. Of merged chunks: the last.
    limit_ms: float = 0.0


class Stage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """From `start` to `end`. Fields that do not apply to a stage keep their defaults and are left out."""

    name: StageName
    start: float
    end: float
    output_tokens: int = 0  # sampled in it
    waits: list[Wait] = []  # queue, preempted
    swapped_tokens: int = 0  # preempted: moved to host pages
    dropped_tokens: int = 0  # preempted: dropped, to be computed again
    cached_tokens: int = 0  # prefill, recompute: found in the prefix cache; load: loaded into it
    computed_tokens: int = 0  # prefill, recompute
    missed: str = ""  # prefill: why the prefix cache had no more of it (cache.kv_cache.MissReason); empty: it had all that can be shared
    differs_at: int | None = (
        None  # prefill: first token that differs from the latest prompts of the same API key; None: not known
    )
    differs_from: str = ""  # … the request with the longest beginning in common
    differs_text: str = ""  # … its own text from there on, some tokens of it; shown to its own API key alone
    chunks: list[Chunk] = []  # prefill, recompute
    capped_steps: int = (
        0  # prefill, recompute: steps that computed less of it, or nothing, because streams were running
    )
    steps: int = 0  # decode: steps of the engine meanwhile
    mixed_steps: int = 0  # decode: … that computed prompts of other requests too
    mean_rows: float = 0.0  # decode: rows of those steps
    rows: dict[str, int] = {}  # decode: steps by their number of rows (upper bounds)
    ms: dict[str, int] = {}  # decode: steps by their milliseconds (upper bounds)
    grammar_seconds: float = 0.0  # prefill, recompute, decode: of its steps, spent on the masks of all grammars
    stages: dict[str, float] = {}  # several: seconds by stage
    num_stages: int = 0  # several: how many were folded into it

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Track(msgspec.Struct, frozen=True, gc=False):
    """One choice's way through the engine."""

    index: int
    stages: list[Stage]
    output_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None  # None: it is still on its way
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of those: in its output


class EngineJourney(msgspec.Struct, frozen=True, gc=False):
    """A request's way through the engine, from the queue to the last token of each choice."""

    id: str
    http_id: str  # the HTTP request that it belongs to
    origin: int  # its API process
    received: float
    prompt_tokens: int
    tracks: list[Track]


def fold(stages: list[Stage]) -> None:
    """Keep a list of consecutive stages short: merge those in its middle into one, with the seconds of each kind."""
    while len(stages) > MAX_STAGES:
        first, second = stages[FOLD_AT], stages[FOLD_AT + 1]
        seconds: dict[str, float] = {}
        for stage in (first, second):
            for name, spent in (stage.stages or {stage.name: stage.seconds}).items():
                seconds[name] = seconds.get(name, 0.0) + spent
        folded = (first.num_stages or 1) + (second.num_stages or 1)
        stages[FOLD_AT : FOLD_AT + 2] = [Stage("several", first.start, second.end, stages=seconds, num_stages=folded)]
