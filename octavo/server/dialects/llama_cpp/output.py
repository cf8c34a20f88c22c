"""What clients of llama.cpp's server read: completions and their chunks, and the server's properties and slots."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.messages import Logprobs, SamplingParams
from octavo.server.generate.logprobs import count_logprobs
from octavo.server.generate.offload import one_of
from octavo.text import Text

StopType = Literal["none", "eos", "limit", "word"]


class TopProbability(msgspec.Struct, frozen=True, gc=False):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class Probability(msgspec.Struct, frozen=True, gc=False):
    """Of a token of the answer: the model's own logprob, before temperature and the other samplers."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopProbability]


class Timings(msgspec.Struct, frozen=True, gc=False):
    cache_n: int | None  # prompt tokens found in the prefix cache; null: not known
    prompt_n: int  # prompt tokens that were computed
    prompt_ms: float  # from the request's arrival to the first piece of the answer
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Progress(msgspec.Struct, frozen=True, gc=False):
    total: int
    cache: int
    processed: int
    time_ms: float


class Settings(msgspec.Struct, frozen=True, gc=False):
    """The settings that an answer is made with, by llama.cpp's names."""

    n_predict: int  # -1: until the context is full
    seed: int | None  # null: chosen at random
    temperature: float
    top_k: int  # 0: no limit
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    ignore_eos: bool
    logit_bias: list[tuple[int, float]]
    n_probs: int
    grammar: str  # as the request wrote it; empty: none


class LlamaChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of an answer."""

    index: int
    content: str
    tokens: Sequence[int]
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[Probability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET


class LlamaCompletion(LlamaChunk, frozen=True, kw_only=True, gc=False):
    """A whole answer, or the end of a stream, which has no content."""

    model: str
    prompt: str
    generation_settings: Settings
    stop_type: StopType
    stopping_word: str
    has_new_line: bool
    truncated: bool  # the context is full
    tokens_cached: int | None
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class Rendered(msgspec.Struct, frozen=True):
    prompt: str


class Defaults(msgspec.Struct, frozen=True):
    n_ctx: int
    params: Settings


class Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, frozen=True):
    default_generation_settings: Defaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: Modalities = Modalities()
    is_sleeping: bool = False


class NextToken(msgspec.Struct, frozen=True):
    n_decoded: int
    n_remain: int
    has_next_token: bool


class Slot(msgspec.Struct, frozen=True):
    """A row of the batch. What it computes is shown to the key that asked for it, and to an admin."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
    request_id: str | UnsetType = UNSET  # ours: the HTTP request's
    n_prompt_tokens: int | UnsetType = UNSET
    next_token: NextToken | UnsetType = UNSET


def settings(params: SamplingParams, n_predict: int | None = None, grammar: str = "") -> Settings:
    bias = params.logit_bias or {}
    return Settings(
        n_predict=-1 if n_predict is None else n_predict,
        seed=params.seed,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        repeat_penalty=params.repetition_penalty,
        repeat_last_n=-1,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logit_bias=[*bias.items()],
        n_probs=params.logprobs or 0,
        grammar=grammar,
    )


def probabilities(text: Text, entries: Sequence[Logprobs]) -> list[Probability]:
    def shown(token_id: int, logprob: float) -> TopProbability:
        spelled = text.spell(token_id)
        return TopProbability(token_id, spelled.decode("utf-8", "replace"), list(spelled), logprob)

    found: list[Any] = []
    size = count_logprobs(entries)
    for entry in entries:
        own, *top = map(shown, entry.token_ids, entry.logprobs)
        found.append(one_of(size, Probability(own.id, own.token, own.bytes, own.logprob, top)))
    return found
