"""The request fields that completions and chat share, and what becomes of every field that is not offered.
Knows nothing of prompts, messages or the engine."""

import difflib
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from octavo.errors import InvalidRequest, Unsupported

MAX_STOPS = 64
MAX_STOP_LEN = 1024  # characters of one stop string: the stream holds back as many
MAX_STOP_TOKEN_IDS = 1024

# Known fields that are not offered. null always means absent; these other values ask for nothing beyond what happens
# anyway, so clients that spell out their defaults work. Any other value is refused by name.
NOT_OFFERED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM: sampling
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # vLLM: structured output, today's name and the removed ones
    "structured_outputs": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    # vLLM: engine
    "cache_salt": (),
    "kv_transfer_params": (),
    "priority": (0,),
    "prompt_embeds": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "vllm_xargs": ({},),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk, where include_usage is true


class GenerationFields(BaseModel):
    """null is the same as absent. Ranges are checked by SamplingParams, which has the limits and the words."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Labels for the caller's own books: taken, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_strings(cls, value: object) -> list[str]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise PydanticCustomError("stop", "Input should be a string or a list of strings")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LEN for stop in stops):
            raise PydanticCustomError("stop", f"At most {MAX_STOPS} strings of {MAX_STOP_LEN} characters each")
        return stops

    @field_validator("stop_token_ids", mode="after")
    @classmethod
    def _few_stop_token_ids(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(value) > MAX_STOP_TOKEN_IDS:
            raise PydanticCustomError("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} ids")
        return value

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_in_every_chunk(self) -> bool:
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)


Body = TypeVar("Body", bound=BaseModel)
Fields = TypeVar("Fields", bound=GenerationFields)


def parse_body(body: bytes, schema: type[Body], not_offered: dict[str, tuple[object, ...]]) -> Body:
    """The body as `schema`, which takes extra fields: each is one of `not_offered`, at a harmless value, or refused by name."""
    try:
        fields = schema.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0]) from None
    _refuse_not_offered(fields, not_offered)
    return fields


def parse_fields(body: bytes, schema: type[Fields], not_offered: dict[str, tuple[object, ...]]) -> Fields:
    """The body of an endpoint that generates. Every field is honoured or refused by name; `not_offered` adds the endpoint's own."""
    fields = parse_body(body, schema, {**NOT_OFFERED, **not_offered})
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options is only for streams: set stream to true", param="stream_options")
    if None not in (fields.max_tokens, fields.max_completion_tokens) and (
        fields.max_tokens != fields.max_completion_tokens
    ):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are two names of one limit: give one of them",
            param="max_completion_tokens",
        )
    return fields


def _refuse_not_offered(fields: BaseModel, table: dict[str, tuple[object, ...]]) -> None:
    for name, value in (fields.model_extra or {}).items():
        harmless = table.get(name)
        if harmless is None:
            close = difflib.get_close_matches(name, [*type(fields).model_fields, *table], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Unsupported(f"unknown field {_short(name)}{hint}", param=name[:100])
        # Compared with their types: 0 and false are different answers in JSON.
        if value is not None and not any(type(value) is type(same) and value == same for same in harmless):
            raise Unsupported(f"{name} = {_short(value)} is not supported here yet: leave {name} out", param=name)


def _invalid(error: ErrorDetails) -> InvalidRequest:
    if error["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}")
    if not error["loc"]:
        return InvalidRequest("the body must be a JSON object")
    param = str(error["loc"][0])
    for part in error["loc"][1:]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}"
    param = param[:200]
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param)
    words = error["msg"][:1].lower() + error["msg"][1:]
    return InvalidRequest(f"{param}: {words}, got {_short(error['input'])}", param=param)


def _short(value: object) -> str:
    """A value as JSON, cut to what fits in a message."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 60 else text[:57] + "..."
