"""The request fields that completions and chat share, and what becomes of every field that is not offered: see Dialect.
Knows nothing of prompts, messages or the engine."""

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from octavo.config import ServerConfig
from octavo.errors import InvalidRequest, Unsupported
from octavo.observe.journeys import current
from octavo.server.search_fields import RepetitionDetection, SearchFields, moot
from octavo.server.shapes import Stops

log = logging.getLogger("octavo.server")

MAX_STOPS = 64
MAX_STOP_LEN = 1024  # characters of one stop string: the stream holds back as many
MAX_STOP_TOKEN_IDS = 1024
MAX_MILLISECONDS = 10**12  # far beyond any use: what is larger would not fit a clock
MAX_NAMED_BACK = 64  # an answer does not grow with the rubbish in its request
MAX_NAME_LEN = 100
MAX_LOGGED = 1000  # names that are remembered as told

# Known fields that are not offered. null always means absent; these other values ask for nothing beyond what happens
# anyway, so clients that spell out their defaults work. Any other value is refused by name.
NOT_OFFERED: dict[str, tuple[object, ...]] = {
    # OpenAI
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM: sampling
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "watermarking": (False,),
    # vLLM: engine
    "cache_salt": (),
    "kv_transfer_params": (),
    "prompt_embeds": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "vllm_xargs": ({},),
}


LABELS: dict[str, str] = {
    "cache_control": "equal prefixes are shared without it",
    "user": "a label for the caller's own books",
    "metadata": "a label for the caller's own books",
    "prompt_cache_key": "equal prefixes are shared without it",
    "safety_identifier": "a label for the caller's own books",
}
"""Fields of the schemas that ask for nothing: taken without a word, and why that is right."""

WITHOUT_EFFECT: dict[str, str] = {
    "kv_transfer_params": "KV pages stay in this server",
    "mm_processor_kwargs": "there are no images or sounds to process",
    "media_io_kwargs": "there are no images or sounds to read",
    "prediction": "nothing is guessed ahead from it",
    "reasoning_effort": "this model has no such dial",
    "request_id": "the header X-Request-Id names a request",
    "return_prompt_text": "the prompt's text is not sent back",
    "return_token_offsets": "offsets are not sent back",
    "service_tier": "there is one tier",
    "session_id": "no request is bound to a session",
    "store": "answers are not stored",
    "thinking_token_budget": "max_tokens is the one limit",
    "verbosity": "this model has no such dial",
    "vllm_xargs": "there is no extension that would read it",
    # of the Responses API
    "include.reasoning.encrypted_content": "reasoning is given as plain text, and taken back as such",
    "context_management": "nothing is edited out of a context",
    "prompt_cache_options": "equal prefixes are shared without it",
    "prompt_cache_retention": "cached prefixes stay until others need their room",
    "reasoning.context": "the template says which reasoning a model sees again",
    "reasoning.generate_summary": "reasoning is given in full",
    "reasoning.mode": "there is one mode",
    "reasoning.summary": "reasoning is given in full",
    "stream_options.include_obfuscation": "events are not padded",
    "text.verbosity": "this model has no such dial",
    # of Anthropic's
    "diagnostics": "there is nothing to compare a prompt with",
    "inference_geo": "everything is computed here",
    "speed": "there is one speed",
    "thinking.budget_tokens": "max_tokens is the one limit",
    "thinking.display": "reasoning is given in full",
}
"""Fields that are not offered and may be passed over, and why: named back, and refused in strict mode. What else is not
offered is refused in every mode: it says what the answer must be (its shape, its tokens, what it is made from), and another
answer would be a wrong one."""


INSTEAD: dict[str, str] = {
    "function_call": "tool_choice, its newer form",
    "functions": "tools, its newer form",
}
"""Fields that are not offered, and what does the same."""


BY_FLAG: dict[str, tuple[str, str]] = {
    "chat_template": ("trust_request_chat_template", "--trust-request-chat-template"),
}
"""Fields that are honoured only where the server was started so: the config's name of the flag, and its own."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk, where include_usage is true
    include_progress: bool | None = None  # ours: chunks without text that tell how far the prompt is computed
    include_queue: bool | None = None  # ours: comments that tell the place in the queue, until there is a row
    resumable: bool | None = None  # ours: the stream can be read on at another connection


class RequestFields(BaseModel):
    """A request's body. null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the body that have no effect and that the answer names back."""
        return self._ignored

    def pass_over(self, name: str, server: ServerConfig) -> None:
        """A field of the schema turns out to have no effect on this model."""
        if server.strict_fields:
            raise Unsupported(f"{name} is not supported here: {WITHOUT_EFFECT[name]}", param=name)
        log.info("field without effect: %s", name)
        self._ignored = (*self._ignored, name)


class SamplingFields(RequestFields):
    """How tokens are chosen, by vLLM's names: for every dialect. Ranges are checked by SamplingParams, which has the limits
    and the words."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # a validator makes the keys numbers
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # What the answer must look like: vLLM's field, and the names that it had before.
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

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

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _bias_by_id(cls, value: dict[str, float] | None) -> dict[int, float] | None:
        if value is None:
            return None
        if not all(key.isascii() and key.isdecimal() and len(key) < 19 for key in value):
            raise PydanticCustomError("logit_bias", "Keys should be token ids")
        return {int(key): bias for key, bias in value.items()}


class GenerationFields(SamplingFields, SearchFields):
    """What completions and chat share."""

    priority: int | None = None  # lower goes first, where the server schedules by priority
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    # Both values are honoured: decoding here never puts a space between special tokens that is not in them.
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    deadline_ms: int | None = None  # ours: from its arrival, after which the request is ended
    max_queue_ms: int | None = None  # ours: the same, if it has no row by then
    stream_interval: int | None = None  # vLLM's: tokens of a choice in one event of a stream, the first one's aside
    # Labels for the caller's own books: taken, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_in_every_chunk(self) -> bool:
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    @property
    def wants_queue(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_queue)

    @property
    def wants_resumable(self) -> bool:
        return bool(self.stream_options and self.stream_options.resumable)

    def tokens_per_event(self, server: ServerConfig) -> int:
        """1 for a whole answer: nobody watches it grow."""
        return (self.stream_interval or server.stream_interval) if self.stream else 1


Body = TypeVar("Body", bound=RequestFields)


def make_fields(schema: type[Body], values: Mapping[str, object]) -> Body:
    """From another dialect's values, checked as if they had come in a body. What the schema does not have is refused: nobody
    would name it back."""
    try:
        fields = schema.model_validate(values)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0]) from None
    for name in fields.model_extra or ():
        raise Unsupported(f"{name} is not supported here", param=name)
    return fields


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Body]):
    """What one route takes. Every field is in the schema, in `not_offered` (with the values that ask for nothing), or unknown."""

    name: str
    path: str
    schema: type[Body]
    not_offered: Mapping[str, tuple[object, ...]]


async def read_fields(request: Request, dialect: Dialect[Body], server: ServerConfig) -> Body:
    """The body's fields. Those without effect are logged, once for each name, and in the answer it is for the endpoint to
    name them back (`fields.ignored`)."""
    fields = parse_body(await request.body(), dialect, server)
    if fields.ignored:
        level = logging.INFO if _is_old_news(dialect.path, fields.ignored) else logging.WARNING
        names = ", ".join(map(_short, fields.ignored))
        log.log(level, "%s %s: fields without effect: %s", request.scope["octavo.request_id"], dialect.path, names)
    return fields


def parse_body(body: bytes, dialect: Dialect[Body], server: ServerConfig) -> Body:
    """Every field is honoured, refused by name, or among the result's `ignored`; in strict mode the last are refused too."""
    try:
        fields = dialect.schema.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0]) from None
    ignored = [name for name, value in _extras(fields) if _is_ignored(name, value, dialect, server)]
    for name, why in moot(fields):
        if server.strict_fields:
            raise Unsupported(f"{name} has no effect here, {why}: leave it out", param=name)
        ignored.append(name)
    if ignored:
        fields._ignored = tuple(name[:MAX_NAME_LEN] for name in ignored[:MAX_NAMED_BACK])
    for name, (knob, flag) in BY_FLAG.items():
        if getattr(fields, name, None) is not None and not getattr(server, knob):
            raise Unsupported(f"{name} is taken only by a server that was started with {flag}", param=name)
    _check_limits(fields, server)
    if (journey := current.get()) is not None:
        journey.reach("parse")
    return fields


def _extras(fields: RequestFields) -> Iterator[tuple[str, object]]:
    """What no schema has, in the body and in the objects within it."""
    yield from (fields.model_extra or {}).items()
    for outer, value in fields:
        if isinstance(value, BaseModel):
            yield from ((f"{outer}.{name}", inner) for name, inner in (value.model_extra or {}).items())


def _is_ignored(name: str, value: object, dialect: Dialect[Body], server: ServerConfig) -> bool:
    """False: it asks for nothing. Raises Unsupported where it cannot be passed over."""
    harmless = dialect.not_offered.get(name)
    if harmless is None:
        if server.strict_fields:
            close = difflib.get_close_matches(
                name[:MAX_NAME_LEN], [*dialect.schema.model_fields, *dialect.not_offered], n=1
            )
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Unsupported(f"unknown field {_short(name)}{hint}", param=name[:MAX_NAME_LEN])
        return True
    # Compared with their types: 0 and false are different answers in JSON.
    if value is None or any(type(value) is type(same) and value == same for same in harmless):
        return False
    if server.strict_fields or name not in WITHOUT_EFFECT:
        instead = f"use {INSTEAD[name]}" if name in INSTEAD else f"leave {name} out"
        raise Unsupported(f"{name} = {_short(value)} is not supported here: {instead}", param=name)
    return True


def _check_limits(fields: RequestFields, server: ServerConfig) -> None:
    messages = getattr(fields, "messages", None)
    if isinstance(messages, list) and len(messages) > server.max_messages:
        raise InvalidRequest(
            f"messages has {len(messages)} entries; this server takes at most {server.max_messages} (--max-messages)",
            param="messages",
        )
    if not isinstance(fields, GenerationFields):
        return
    fields.check_search(server)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        count = getattr(fields, name, None)
        if type(count) is int and not 0 <= count <= server.max_logprobs:
            limit = f"between 0 and {server.max_logprobs} (--max-logprobs)"
            raise InvalidRequest(f"{name} must be {limit}, got {count}", param=name)
    for name in ("deadline_ms", "max_queue_ms"):
        number = getattr(fields, name)
        if number is not None and not 1 <= number <= MAX_MILLISECONDS:
            raise InvalidRequest(f"{name} must be between 1 and {MAX_MILLISECONDS}, got {number}", param=name)
    if fields.stream_interval is not None and fields.stream_interval < 1:
        raise InvalidRequest(
            f"stream_interval must be at least 1, got {fields.stream_interval}", param="stream_interval"
        )
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options is only for streams: set stream to true", param="stream_options")
    if None not in (fields.max_tokens, fields.max_completion_tokens) and (
        fields.max_tokens != fields.max_completion_tokens
    ):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are two names of one limit: give one of them",
            param="max_completion_tokens",
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs come with a whole answer only: leave stream or prompt_logprobs out",
            param="prompt_logprobs",
        )


_logged: set[tuple[str, str]] = set()


def _is_old_news(path: str, names: tuple[str, ...]) -> bool:
    """Whether the log has told of all of these: a client that sends a field with each request is worth one line."""
    new = {(path, name) for name in names} - _logged
    if not new or len(_logged) >= MAX_LOGGED:  # then somebody makes names up, and the log shall not grow with them
        return True
    _logged.update(new)
    return False


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
