"""What a request to Ollama's API may say, and the same as a chat request, a prompt, or embedding inputs."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, field_validator

from octavo.errors import Field, InvalidRequest, Unsupported, quote
from octavo.server.dialects.ollama.messages import chat_messages
from octavo.server.dialects.ollama.models import NamedRequest
from octavo.server.generate import chat_request, embeddings
from octavo.server.generate.chat_request import ChatFields, ChatPrompt
from octavo.server.generate.field_names import FieldNames
from octavo.server.generate.infill import fill_prompt, fill_tokens
from octavo.server.generate.messages import MESSAGES
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import Prompt, check_text_len
from octavo.server.schema.fields import (
    MAX_STOPS,
    GenerationFields,
    LimitFields,
    PlainStreamFields,
    RequestFields,
    make_fields,
)
from octavo.server.schema.lists import AtMost
from octavo.server.schema.shapes import OllamaFormat, OllamaMessages, OllamaThink, StructuredOutputs, Texts, Tools
from octavo.server.state.service import Service

EFFORTS = ("low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch thinking on or off."""
RANDOM_SEED = -1
ALL_TOKENS = -1  # of repeat_last_n
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?", re.ASCII)
_MAX_DURATION_LEN = 40  # characters

_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "keep_alive": (-1, -1.0, "-1", "-1s", "-1m", "-1h"),
    "options.embedding_only": (False,),
    "options.f16_kv": (True,),
    "options.logits_all": (False,),
    "options.low_vram": (False,),
    "options.main_gpu": (0,),
    "options.mirostat": (0,),
    "options.mirostat_eta": (0.1,),
    "options.mirostat_tau": (5.0, 5),
    "options.num_batch": (),
    "options.num_gpu": (-1,),
    "options.num_gqa": (),
    "options.num_keep": (0,),
    "options.num_thread": (0,),
    "options.numa": (False,),
    "options.penalize_newline": (True,),
    "options.tfs_z": (1, 1.0),
    "options.typical_p": (1, 1.0),
    "options.use_mlock": (False,),
    "options.use_mmap": (True,),
    "options.vocab_only": (False,),
}
CHAT_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **_NOT_OFFERED,
    "messages[].images": ([],),
    "shift": (False,),
}
GENERATE_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **_NOT_OFFERED,
    "context": ([],),
    "height": (0,),
    "images": ([],),
    "shift": (False,),
    "steps": (0,),
    "template": ("",),
    "width": (0,),
}
EMBED_NOT_OFFERED = _NOT_OFFERED

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, for what neither the request nor the model says: most GGUF files say nothing, and its users expect calmer answers than
OpenAI's temperature of 1 gives."""
_SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop")
"""Options that a chat request has under the same name."""
_OF_OPTIONS = {
    **{name: f"options.{name}" for name in (*_SAME, "seed")},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "response_format.json_schema.schema": "format",
    "response_format.json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
CHAT_NAMES = FieldNames(_OF_OPTIONS)
GENERATE_NAMES = FieldNames(
    {**_OF_OPTIONS, "messages[].content": "prompt", "messages[]": "prompt", "messages": "prompt"}
)
EMBED_NAMES = FieldNames({"truncate_prompt_tokens": "truncate"})
PROMPT_NAMES = FieldNames({"input": "prompt"})


class Options(BaseModel):
    """null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, AtMost(MAX_STOPS)] = None
    num_predict: int | None = None  # 0 and less: until the model or the context ends
    num_ctx: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """An upper bound for the answer. None: there is none."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def sampling(self) -> dict[str, Any]:
        """As fields of a chat request."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        values["seed"] = None if self.seed == RANDOM_SEED else self.seed
        values["repetition_penalty"] = None if self.repeat_last_n == 0 else self.repeat_penalty
        return values


class ModelFields(RequestFields):
    """What requests that need the model share."""

    options: Options | None = None

    @property
    def keep_alive(self) -> object:
        """It is not offered: a value without effect is named back."""
        return (self.model_extra or {}).get("keep_alive")

    @property
    def chosen(self) -> Options:
        return self.options or Options()

    def check_options(self, service: Service) -> None:
        """Record what has no effect: the context has the size that the server gave it."""
        read_keep_alive(self.keep_alive)  # raises where it is no duration
        options = self.chosen
        if options.num_ctx is not None and options.num_ctx < 1:
            raise InvalidRequest(Field("options", "num_ctx") + f" must be at least 1, got {quote(options.num_ctx)}")
        if options.num_ctx is not None and options.num_ctx > service.report.max_model_len:
            self.pass_over(Field("options", "num_ctx"), service.config)
        if options.repeat_last_n not in (None, 0, ALL_TOKENS):
            self.pass_over(Field("options", "repeat_last_n"), service.config)

    def check_load(self, service: Service) -> None:
        """Check a request without a prompt, which asks to load the model, or to unload it."""
        self.check_options(service)
        if read_keep_alive(self.keep_alive) == 0:
            raise Unsupported(
                Field("keep_alive")
                + " 0 asks to unload the model, which is served until the server stops: leave it out"
            )


class AnswerFields(ModelFields, PlainStreamFields):
    """What /api/chat and /api/generate share."""

    stream: bool | None = True
    format: OllamaFormat = None
    think: OllamaThink = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    structured_outputs: StructuredOutputs = None  # vLLM's, and what is to become of constraints that cannot be enforced

    @field_validator("stream", mode="after")
    @classmethod
    def _streamed_unless_false(cls, value: bool | None) -> bool:
        return value is not False

    @property
    def num_logprobs(self) -> int | None:
        """Top logprobs of each token. None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def values(self, service: Service) -> dict[str, Any]:
        """All but the messages as fields of a chat request."""
        self.check_options(service)
        most = service.config.budget.max_logprobs
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= most:
            limit = f" must be between 0 and {most} (--max-logprobs), got {quote(self.top_logprobs)}"
            raise InvalidRequest(Field("top_logprobs") + limit)
        values = {**self.chosen.sampling(), **self.limits, "stream": self.stream}
        for name, default in DEFAULTS.items():
            if values[name] is None and name not in service.text.default_sampling:
                values[name] = default
        values |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        values["response_format"] = _response_format(self.format)
        values["structured_outputs"] = self.structured_outputs
        return values | _thinking(service, self)


class OllamaChatRequest(AnswerFields):
    messages: OllamaMessages = None
    tools: Tools = None


class OllamaGenerateRequest(AnswerFields):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None  # what follows the gap that the answer is to fill

    @property
    def is_raw(self) -> bool:
        """The chat template is left out."""
        return bool(self.raw or self.suffix)


class EmbedRequest(ModelFields, LimitFields):
    input: Texts
    truncate: bool | None = None
    dimensions: int | None = None


class OldEmbedRequest(ModelFields, LimitFields):
    """Of /api/embeddings, which takes one text."""

    prompt: str


class ShowRequest(NamedRequest):
    pass


class PullRequest(NamedRequest):
    stream: bool | None = True

    @field_validator("stream", mode="after")
    @classmethod
    def _streamed_unless_false(cls, value: bool | None) -> bool:
        return value is not False


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────


async def parse_chat(service: Service, fields: OllamaChatRequest) -> tuple[ChatFields, ChatPrompt]:
    """The prompt. Unless `truncate` is false, the oldest turns are dropped where they do not fit."""
    asked = await offload_prompt(fields.num_bytes, lambda: _chat_fields(service, fields))
    parse = chat_request.parse if fields.truncate is False else chat_request.parse_cut
    with CHAT_NAMES.in_errors():
        return asked, await parse(service, asked)


async def parse_generate(service: Service, fields: OllamaGenerateRequest) -> tuple[ChatFields, ChatPrompt]:
    """The prompt as one turn of a chat."""
    asked = await offload_prompt(fields.num_bytes, lambda: _generate_fields(service, fields))
    with GENERATE_NAMES.in_errors():
        return asked, await chat_request.parse(service, asked)


async def parse_raw(service: Service, fields: OllamaGenerateRequest) -> tuple[GenerationFields, Prompt]:
    """The prompt as it is, without the chat template; with `suffix`, between the tokens for filling in the middle."""
    return await offload_prompt(fields.num_bytes, lambda: _parse_raw(service, fields))


def _chat_fields(service: Service, fields: OllamaChatRequest) -> ChatFields:
    check_text_len(service, fields.num_bytes, (fields.messages, fields.tools), MESSAGES)
    values = fields.values(service)
    messages = values["messages"] = chat_messages(fields.messages or [])
    if fields.tools:
        values["tools"] = fields.tools
    last = messages[-1]
    if last["role"] == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls"):
        values["continue_final_message"] = True
    with CHAT_NAMES.in_errors():
        return make_fields(ChatFields, values, fields.num_bytes)


def _generate_fields(service: Service, fields: OllamaGenerateRequest) -> ChatFields:
    values = fields.values(service)
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    values["messages"] = [*system, {"role": "user", "content": fields.prompt or ""}]
    with GENERATE_NAMES.in_errors():
        return make_fields(ChatFields, values, fields.num_bytes)


def _parse_raw(service: Service, fields: OllamaGenerateRequest) -> tuple[GenerationFields, Prompt]:
    for name in ("system", "think"):
        if getattr(fields, name):
            cause = "raw" if fields.raw else "suffix"
            raise Unsupported(
                Field(name) + f" needs the chat template, which {cause} leaves out: leave one of them out"
            )
    values = fields.values(service)
    for name in ("logprobs", "top_logprobs", "chat_template_kwargs", "include_reasoning"):
        values.pop(name, None)
    prompt = fields.prompt or ""
    check_text_len(service, fields.num_bytes, (prompt, fields.suffix or ""), Field("prompt"))
    most, text = service.report.max_model_len, service.text
    if fields.suffix:
        tokens = fill_tokens(text, "suffix")
        ids = fill_prompt(text, tokens, prompt, fields.suffix, most, names=("prompt", "suffix"))
        values["stop_token_ids"] = [*tokens.ends]
    else:
        ids = text.encode(prompt, param="prompt", max_tokens=most)
    with GENERATE_NAMES.in_errors():
        return make_fields(GenerationFields, values, fields.num_bytes), Prompt(ids, Field("prompt"), prompt)


def _thinking(service: Service, fields: AnswerFields) -> dict[str, Any]:
    """`think` as fields of a chat request."""
    match fields.think:
        case None:
            return {}
        case bool(is_wanted):
            text = service.text
            switches = [name for name in SWITCHES if text.template_reads(name)]
            if is_wanted and text.formats.thinking is None and not switches:
                fields.pass_over(Field("think"), service.config)
            return {"chat_template_kwargs": dict.fromkeys(switches, is_wanted), "include_reasoning": is_wanted}
        case str(effort) if effort in EFFORTS:
            return {"reasoning_effort": effort}
        case other:
            wanted = ", ".join(map(repr, EFFORTS))
            raise InvalidRequest(Field("think") + f" must be true, false or one of {wanted}, got {quote(other)}")


def _response_format(format: object) -> dict[str, Any] | None:
    match format:
        case None | "":
            return None
        case "json":
            return {"type": "json_object"}
        case Mapping():
            return {"type": "json_schema", "json_schema": {"name": "format", "schema": format, "strict": True}}
        case other:
            raise InvalidRequest(Field("format") + f' must be "json" or a JSON schema, got {quote(other)}')


def read_keep_alive(value: object) -> float | None:
    """Positive, 0 or negative: for a while, not at all, for ever. None: it is not given."""
    match value:
        case None:
            return None
        case bool():
            pass
        case int() | float():
            return value
        case str() if len(value) <= _MAX_DURATION_LEN and _DURATION.fullmatch(value):
            if value.startswith("-"):
                return -1
            return 1 if re.search("[1-9]", value) else 0
    raise InvalidRequest(
        Field("keep_alive") + f' must be a number of seconds or a duration such as "5m", got {quote(value)}'
    )


# ── embeddings ──────────────────────────────────────────────────────────────────────────────────────


def embedding_fields(service: Service, fields: EmbedRequest) -> embeddings.EmbeddingRequest:
    """The same as OpenAI's. Unless `truncate` is false, an input that is too long is cut."""
    fields.check_options(service)
    _check_texts(fields.input)
    cut = None if fields.truncate is False else -1
    values = {"input": fields.input, "dimensions": fields.dimensions, "truncate_prompt_tokens": cut, **fields.limits}
    return make_fields(embeddings.EmbeddingRequest, values, fields.num_bytes)


def old_embedding_fields(service: Service, fields: OldEmbedRequest) -> embeddings.EmbeddingRequest:
    fields.check_options(service)
    values = {"input": fields.prompt, "truncate_prompt_tokens": -1, **fields.limits}
    return make_fields(embeddings.EmbeddingRequest, values, fields.num_bytes)


def _check_texts(given: object) -> None:
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(text, str) for text in given)):
        raise InvalidRequest(Field("input") + " must be a string or a list of strings")
