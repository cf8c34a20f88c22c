"""The request fields that dialects share, and how a body is read: see RouteSchema."""

import difflib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from octavo import fresh
from octavo.config import Config
from octavo.errors import Field, InvalidRequest, Unsupported, quote, quote_json
from octavo.messages import RepetitionDetectionParams
from octavo.messages.params import MAX_BAD_WORDS, MAX_BIASES, MAX_LOGPROB_TOKEN_IDS
from octavo.observe.journeys.journey import current
from octavo.server.schema.json_size import check_json
from octavo.server.schema.lists import TOO_MANY, AtMost, FirstError, too_many
from octavo.server.schema.shapes import ResponseFormat, Stops, StructuredOutputs
from octavo.server.schema.unknown import (
    MAX_FOUND,
    Inside,
    UnhonouredField,
    UnhonouredFields,
    build_tree,
    find_unhonoured,
)
from octavo.server.schema.unsupported import BY_FLAG, FORM_FIELDS, INSTEAD, WITHOUT_EFFECT, Harmless
from octavo.server.threads import Pool
from octavo.text.grammar.build import MAX_CHOICES

log = logging.getLogger("octavo.server")

MAX_STOPS = 64
MAX_STOP_LEN = 1024  # characters of one stop string: a stream holds back as many
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # the largest vocabularies have about as many
MAX_TEMPLATE_VARIABLES = 64
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = (
    16,
    64,
    512,
)  # entries, characters: OpenAI's limits for stored objects
Retention = Literal["in_memory", "in-memory", "24h", "5m", "1h"]
"""OpenAI's prompt_cache_retention; the last two are Anthropic's."""
MAX_MILLISECONDS = 10**12  # far beyond any use, and fits a clock
MAX_REFUSED = 8  # fields that one error lists by name
MAX_LOGGED = 1000  # field names remembered as logged
MAX_SPELLED = 200  # characters of a field's name in an error
LARGE_BODY = 64 * 1024  # bytes: larger bodies are parsed in a thread, so that other streams of this process do not wait
BODIES = Pool("request bodies", num_threads=1, max_waiting=256)
"""Parses large bodies. One thread: it holds the GIL nearly all the time."""


class RequestFields(BaseModel):
    """A request's body. null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    _ignored: tuple[Field, ...] = PrivateAttr(default=())
    _num_more: int = PrivateAttr(default=0)
    _num_bytes: int = PrivateAttr(default=0)

    @property
    def num_bytes(self) -> int:
        """Size of the body, a measure of the work that it asks for. No text in it has more characters."""
        return self._num_bytes

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields without effect, which the answer lists: at most MAX_FOUND, then how many more there are."""
        names = map(str, self._ignored[:MAX_FOUND])
        num_more = max(0, len(self._ignored) - MAX_FOUND) + self._num_more
        return (*names, f"and {num_more} more") if num_more else tuple(names)

    @property
    def passed_over(self) -> tuple[Field, ...]:
        """Paths of all fields without effect."""
        return self._ignored

    def note(self, fields: Sequence[Field], num_fields: int) -> None:
        """Record parts of a field's value that constrain nothing, in strict mode too: annotations of a schema. `num_fields`: all of
        them, of which `fields` may hold only the first."""
        kept = tuple(fields[:MAX_FOUND])
        self._ignored = (*self._ignored, *kept)
        self._num_more += num_fields - len(kept)

    @property
    def num_more(self) -> int:
        """Fields without effect that are not in `passed_over`."""
        return self._num_more

    def pass_over(self, field: Field, config: Config, why: str = "") -> None:
        """Record that a field of the schema has no effect with this model, or beside the request's other fields. Strict mode
        refuses it. `why`: empty: as WITHOUT_EFFECT says."""
        if config.server.strict_fields:
            raise Unsupported(field + f" is not supported here: {why or WITHOUT_EFFECT[_row(str(field))]}")
        log.info("field without effect: %s", field)
        self._ignored = (*self._ignored, field)


CONSTRAINT_ALIASES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Other servers' names of members of structured_outputs: vLLM's older ones, SGLang's, llama.cpp's."""
_CONSTRAINTS = {"structured_outputs", *CONSTRAINT_ALIASES}


class RepetitionDetection(BaseModel):
    """vLLM's. null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None

    def params(self) -> RepetitionDetectionParams:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return RepetitionDetectionParams(**{name: value for name, value in given.items() if value is not None})


class SamplingFields(RequestFields):
    """How tokens are sampled, by vLLM's names. SamplingParams checks the ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[int] | None, AtMost(MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # A validator turns the keys into numbers.
    logit_bias: Annotated[dict[str, float] | None, AtMost(MAX_BIASES)] = None
    allowed_token_ids: Annotated[list[int] | None, FirstError(), AtMost(MAX_ALLOWED_TOKEN_IDS)] = None
    bad_words: Annotated[list[str] | None, AtMost(MAX_BAD_WORDS)] = None
    logprob_token_ids: Annotated[list[int] | None, AtMost(MAX_LOGPROB_TOKEN_IDS)] = None
    repetition_detection: RepetitionDetection | None = None
    use_speculation: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Structured output: vLLM's field, and its older names.
    structured_outputs: StructuredOutputs = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, AtMost(MAX_CHOICES)] = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # The names of SGLang (regex, ebnf), llama.cpp (grammar, json_schema) and text-generation-inference (an object as grammar).
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None

    @property
    def has_constraint(self) -> bool:
        """Whether structured_outputs or an alias of it is given, be it with a value that constrains nothing."""
        return not self.model_fields_set.isdisjoint(_CONSTRAINTS)

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_strings(cls, value: object) -> list[str]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            raise too_many(stops, MAX_STOPS)
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise PydanticCustomError("stop", "Input should be a string or a list of strings")
        if any(len(stop) > MAX_STOP_LEN for stop in stops):
            raise PydanticCustomError("stop", f"Strings of at most {MAX_STOP_LEN} characters are allowed")
        return stops

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _bias_by_id(cls, value: dict[str, float] | None) -> dict[int, float] | None:
        if value is None:
            return None
        for key in value:
            if not (key.isascii() and key.isdecimal() and len(key) < 19):
                raise PydanticCustomError(
                    "logit_bias", "Names should be token ids, not {key}", {"key": quote_json(key)}
                )
        return {int(key): bias for key, bias in value.items()}


class LimitFields(BaseModel):
    deadline_ms: int | None = None  # ours: from arrival; the request is ended then
    max_queue_ms: int | None = None  # ours: from arrival; the request is ended then if it has no row

    @property
    def limits(self) -> dict[str, int | None]:
        """By name, for another dialect's fields."""
        return {name: getattr(self, name) for name in LimitFields.model_fields}

    def times(self, arrived: float) -> dict[str, float]:
        """As fields of a GenerateRequest. Empty where no limit is set."""
        given = (("deadline", self.deadline_ms), ("queue_until", self.max_queue_ms))
        return {name: arrived + limit / 1000 for name, limit in given if limit is not None}

    def check_limits(self) -> None:
        for name in LimitFields.model_fields:
            limit = getattr(self, name)
            if limit is not None and not 1 <= limit <= MAX_MILLISECONDS:
                raise InvalidRequest(f"{name} must be between 1 and {MAX_MILLISECONDS}, got {quote(limit)}", param=name)


class QueueOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_queue: bool | None = None  # ours: SSE comments with the place in the queue, until the request has a row


class PlainStreamFields(LimitFields):
    """Fields of a dialect whose answers can be streamed, without options for that."""

    stream: bool | None = None

    @property
    def wants_queue(self) -> bool:
        """Whether the place in the queue is sent before the answer."""
        return False

    @property
    def wants_resumable(self) -> bool:
        """Whether the stream can be resumed on another connection. Not every dialect offers this."""
        return False


class StreamFields(PlainStreamFields):
    """Fields of a dialect whose streams have options. It may have more than these."""

    stream_options: QueueOptions | None = None

    @property
    def wants_queue(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_queue)

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for streams: set stream to true", param="stream_options")


_CHOICES, _BEST_OF = Field("n"), Field("best_of")


class SearchFields(BaseModel):
    """How many choices are answered, and out of how many."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None  # transformers': true, false or "never"

    @property
    def choices_field(self) -> Field:
        """The field that says how many sequences each prompt has."""
        return _CHOICES if self.best_of is None else _BEST_OF

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt."""
        return self.best_of or self.n or 1

    @property
    def num_kept(self) -> int | None:
        """How many of each prompt's `best_of` choices are returned. None: all. (Of beams the engine returns only the best.)"""
        return (self.n or 1) if self.best_of is not None and not self.use_beam_search else None

    def check_search(self, config: Config) -> None:
        for name in ("n", "best_of"):
            count = getattr(self, name)
            if count is not None and count > config.budget.max_n:
                raise InvalidRequest(
                    f"{name} must be at most {config.budget.max_n} (--max-n), got {quote(count)}", param=name
                )
        if getattr(self, "stream", None) and (self.num_kept or 0) and (self.best_of or 0) > (self.n or 1):
            raise InvalidRequest(
                "best_of cannot be streamed, since the best is known only when all have ended: leave stream or best_of out",
                param="best_of",
            )

    @field_validator("early_stopping", mode="after")
    @classmethod
    def _one_of_three(cls, value: object) -> object:
        if value is None or isinstance(value, bool) or value == "never":
            return value
        raise PydanticCustomError("early_stopping", 'Input should be true, false or "never"')


class StreamOptions(QueueOptions):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk, where include_usage is true
    include_progress: bool | None = None  # ours: chunks without text that report how far the prompt is computed
    resumable: bool | None = None  # ours: the stream can be resumed on another connection


class GenerationFields(SamplingFields, SearchFields, StreamFields):
    """What completions and chat share."""

    priority: int | None = None  # lower goes first, where the server schedules by priority
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    # Both values are honoured: decoding never adds spaces between special tokens.
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = (
        None  # which end is cut; None: the left, since an answer continues the right
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs as token_id:N
    response_format: ResponseFormat = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None  # vLLM's: tokens of a choice per stream event, after the first token
    # How long its pages stay: a hint (server/generate/retention.py).
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    cache_salt: str | None = None  # vLLM's: it shares prefixes only with requests that have the same
    # Labels for the caller's own use: accepted, without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def retention(self) -> Retention | None:
        """For how long it asks for its pages to stay."""
        return self.prompt_cache_retention

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
    def wants_resumable(self) -> bool:
        return bool(self.stream_options and self.stream_options.resumable)

    def tokens_per_event(self, config: Config) -> int:
        """1 for an answer that is not streamed."""
        return (self.stream_interval or config.server.stream_interval) if self.stream else 1


Body = TypeVar("Body", bound=RequestFields)


def make_fields(
    schema: type[Body], values: Mapping[str, object], num_bytes: int, checked: Mapping[str, object] | None = None
) -> Body:
    """Build fields from another dialect's values, validated as a body would be. Unknown fields are refused: the answer could
    not list them. `num_bytes`: of the request; `checked`: further values, which the same validators have checked."""
    try:
        fields = schema.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None
    for name in fields.model_extra or ():
        raise Unsupported(Field(name) + " is not supported here")
    if checked:
        fields = fields.model_copy(update=checked)
    fields._num_bytes = num_bytes
    return fields


@dataclass(frozen=True, eq=False)
class RouteSchema(Generic[Body]):
    """What one route accepts. Every field, nested ones by their paths, is in the schema, in `not_offered` (with the values that
    ask for nothing), or unknown."""

    name: str
    path: str
    schema: type[Body]
    not_offered: Mapping[str, Harmless]

    @functools.cached_property
    def tree(self) -> Inside:
        answers = issubclass(self.schema, PlainStreamFields)
        not_offered = {**(FORM_FIELDS if answers else {}), **self.not_offered}
        return build_tree(self.schema.model_json_schema(mode="validation"), not_offered)


async def read_fields(request: Request, route: RouteSchema[Body], config: Config) -> Body:
    """Read and check a body. Fields without effect are logged, once per name; the endpoint lists them in its answer
    (`fields.ignored`)."""
    body = await request.body()
    if len(body) > LARGE_BODY:
        fields = await BODIES.run(functools.partial(parse_body, body, route, config))
    else:
        fields = parse_body(body, route, config)
    if fields._ignored or fields._num_more:
        level = logging.INFO if _is_old_news(route.path, fields.passed_over) else logging.WARNING
        names = ", ".join(quote_json(name, 120) for name in fields.ignored)
        log.log(level, "%s %s: fields without effect: %s", request.scope["octavo.request_id"], route.path, names)
    if getattr(fields, "wants_resumable", False) and fresh.current.get() is None:
        fresh.current.set(fresh.new_source())  # another process may have to make the stream again (stream_records.py)
    return fields


def parse_body(body: bytes, route: RouteSchema[Body], config: Config) -> Body:
    """Parse and check a body: every field is honoured, refused by name, or in the result's `ignored`, which strict mode refuses
    too."""
    check_json(body, int(config.budget.max_json_items), config.budget.max_json_depth)
    try:
        fields = route.schema.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None
    fields._num_bytes = len(body)
    _check_counts(fields, config)
    found = find_unhonoured(route.tree, fields)
    idle = [*moot(fields)]
    if found.refused or found.unknown or found.idle or idle:
        _refuse(found, idle, config)
        names = [*(field.path for field in (*found.unknown, *found.idle)), *(name for name, _ in idle)]
        fields._ignored = tuple(map(Field, names))
        fields._num_more = found.num_more
    for name, (knob, flag) in BY_FLAG.items():
        if getattr(fields, name, None) is not None and not getattr(config.server, knob):
            raise Unsupported(f"{name} is only supported by a server that was started with {flag}", param=name)
    _check_limits(fields, config)
    if (journey := current.get()) is not None:
        journey.reach("parse")
    return fields


def _refuse(found: UnhonouredFields, idle: list[tuple[str, str]], config: Config) -> None:
    """Raise Unsupported with the fields that must not be ignored, at most MAX_REFUSED of them."""
    problems = [(field.path, _not_offered(field)) for field in found.refused[:MAX_REFUSED]]
    num_all = len(found.refused)
    if config.server.strict_fields:
        problems += [(field.path, _unknown(field)) for field in found.unknown[:MAX_REFUSED]]
        problems += [(field.path, _not_offered(field)) for field in found.idle[:MAX_REFUSED]]
        problems += [(name, f"{name} has no effect here, because {why}: leave it out") for name, why in idle]
        num_all += len(found.unknown) + len(found.idle) + len(idle) + found.num_more
    if problems:
        problems = problems[:MAX_REFUSED]
        more = f"; and {num_all - len(problems)} more fields" if num_all > len(problems) else ""
        raise Unsupported("; ".join(words for _, words in problems) + more, param=problems[0][0])


def _unknown(field: UnhonouredField) -> str:
    outer, dot, name = field.path.rpartition(".")
    close = difflib.get_close_matches(name, [*(field.siblings or ())], n=1)
    return f"unknown field {quote_json(field.path, 120)}" + (
        f" (did you mean {outer + dot + close[0]!r}?)" if close else ""
    )


def _not_offered(field: UnhonouredField) -> str:
    instead = f"use {INSTEAD[field.row]}" if field.row in INSTEAD else f"leave {field.path} out"
    return f"{field.path} = {quote_json(field.value)} is not supported here: {instead}"


def _row(path: str) -> str:
    """A path as the tables write it: tools[3].type is tools[].type."""
    return re.sub(r"\[\d+\]", "[]", path)


def _check_counts(fields: RequestFields, config: Config) -> None:
    """Check the lengths of lists whose entries are checked by hand."""
    budget = config.budget
    for name, most, flag in (
        ("messages", budget.max_messages, "--max-messages"),
        ("input", budget.max_messages, "--max-messages"),  # of the Responses API
        ("tools", budget.max_tools, "--max-tools"),
    ):
        value = getattr(fields, name, None)
        if isinstance(value, list) and len(value) > most and (name != "input" or not _is_of_prompts(value)):
            raise InvalidRequest(
                f"{name} has {len(value)} entries; this server allows at most {most} ({flag})", param=name
            )


def _is_of_prompts(value: list[Any]) -> bool:
    """Whether `input` is of texts or token ids, as for embeddings, and not of a conversation's items."""
    return not isinstance(value[0], dict)


def _check_limits(fields: RequestFields, config: Config) -> None:
    if isinstance(fields, LimitFields):
        fields.check_limits()
    if isinstance(fields, StreamFields):
        fields.check_stream()
    if not isinstance(fields, GenerationFields):
        return
    fields.check_search(config)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        count = getattr(fields, name, None)
        if type(count) is int and not 0 <= count <= config.budget.max_logprobs:
            limit = f"between 0 and {config.budget.max_logprobs} (--max-logprobs)"
            raise InvalidRequest(f"{name} must be {limit}, got {quote(count)}", param=name)
    if fields.stream_interval is not None and fields.stream_interval < 1:
        raise InvalidRequest(
            f"stream_interval must be at least 1, got {quote(fields.stream_interval)}", param="stream_interval"
        )
    if None not in (fields.max_tokens, fields.max_completion_tokens) and (
        fields.max_tokens != fields.max_completion_tokens
    ):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are two names of the same limit: give only one of them",
            param="max_completion_tokens",
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not supported with stream: leave one of them out",
            param="prompt_logprobs",
        )


_DRAWS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: value in (0, 1),
    "top_p": lambda value: value == 1,
    "top_k": lambda value: value in (-1, 0),
    "min_p": lambda value: value == 0,
}
"""Fields of random sampling, which a beam search ignores; with a test for values that mean the default."""

_OF_BEAMS: dict[str, Callable[[Any], bool]] = {
    "length_penalty": lambda value: value == 1,
    "early_stopping": lambda value: value is False,
}
"""Fields of beam search, which sampling ignores; with a test for values that mean the default."""


def moot(fields: object) -> Iterator[tuple[str, str]]:
    """Yield the given fields that have no effect beside the request's others, and why."""
    loops = getattr(fields, "repetition_detection", None)
    if loops is not None and not loops.max_pattern_size and (loops.min_pattern_size or loops.min_count):
        yield "repetition_detection", "max_pattern_size is 0"
    if getattr(fields, "truncation_side", None) == "right" and getattr(fields, "truncate_prompt_tokens", None) is None:
        yield "truncation_side", "truncate_prompt_tokens is not set"
    is_search = bool(getattr(fields, "use_beam_search", None))
    why = "beam search ranks tokens by the model's own logprobs" if is_search else "it applies only to use_beam_search"
    for name, says_nothing in (_DRAWS if is_search else _OF_BEAMS).items():
        value = getattr(fields, name, None)
        if value is not None and not says_nothing(value):
            yield name, why


def ranges(config: Config) -> dict[str, dict[str, Any]]:
    """Ranges of numeric fields, as SamplingParams and the server's limits have them, for the OpenAPI document."""
    logprobs = {"minimum": 0, "maximum": config.budget.max_logprobs}
    return {
        "temperature": {"minimum": 0, "maximum": 100},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
        "top_k": {"minimum": -1},
        "n": {"minimum": 1, "maximum": config.budget.max_n},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "min_tokens": {"minimum": 0},
        "stream_interval": {"minimum": 1},
        **{name: {"minimum": 1} for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), logprobs),
        **{name: {"minimum": 1, "maximum": MAX_MILLISECONDS} for name in LimitFields.model_fields},
    }


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check the metadata of an object that is stored."""
    if (
        len(metadata) > MAX_METADATA
        or any(len(key) > MAX_METADATA_KEY for key in metadata)
        or any(len(value) > MAX_METADATA_VALUE for value in metadata.values())
    ):
        raise InvalidRequest(
            f"metadata can have at most {MAX_METADATA} entries, with keys of at most {MAX_METADATA_KEY} and values of at most "
            f"{MAX_METADATA_VALUE} characters",
            param="metadata",
        )


_logged: set[tuple[str, str]] = set()


def _is_old_news(path: str, fields: tuple[Field, ...]) -> bool:
    """Whether all of these were logged before: a client that sends a field with every request gets one log line."""
    new = {(path, _row(str(field))) for field in fields} - _logged
    if not new or len(_logged) >= MAX_LOGGED:  # made-up names must not grow the log
        return True
    _logged.update(new)
    return False


_WORDS = {"list_type": "input should be a valid array", "dict_type": "input should be an object"}
"""JSON's words for errors whose own are Python's."""


def _invalid(found: ValidationError) -> InvalidRequest:
    error = found.errors(include_url=False)[0]
    if error["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}")
    if not error["loc"]:
        return InvalidRequest("the body must be a JSON object")
    field = Field(*error["loc"])
    if len(spelled := str(field)) > MAX_SPELLED:
        field = Field(spelled[:MAX_SPELLED])
    if error["type"] == "missing":
        return InvalidRequest(field + " is missing")
    if error["type"] == TOO_MANY:
        return InvalidRequest(field + " has {num} entries; at most {most} are allowed".format(**error["ctx"]))
    words = _WORDS.get(error["type"]) or error["msg"][:1].lower() + error["msg"][1:]
    return InvalidRequest(field + f": {words}, got {quote_json(error['input'])}")
