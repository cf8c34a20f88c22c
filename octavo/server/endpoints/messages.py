"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect: schema, parse, stream, collect.
Knows nothing of the engine beyond Turn, and of content blocks only where they are read and written."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from octavo.errors import Field, InvalidRequest
from octavo.server.dialects.anthropic import output
from octavo.server.dialects.anthropic.blocks import chat_messages, chat_tool_choice, chat_tools
from octavo.server.generate import chat_request
from octavo.server.generate.chat_task import ChatTask
from octavo.server.generate.field_names import FieldNames
from octavo.server.generate.requests import new_id
from octavo.server.http.errors import ERROR_SHAPES, ErrorDetail, describe
from octavo.server.http.sse import EventStream, typed_event, until_gone
from octavo.server.schema.fields import Dialect, RequestFields, make_fields, read_fields
from octavo.server.schema.limits import StreamFields
from octavo.server.schema.shapes import (
    EVENTS,
    CacheControl,
    OutputFormat,
    Shape,
    System,
    TurnMetadata,
    Turns,
    TurnToolChoice,
    TurnTools,
)
from octavo.server.state.ignored_fields import json_answer
from octavo.server.state.service import Service

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking.budget_tokens": (),
    "thinking.display": ("summarized",),
}
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates have a model think, or not."""
NAMES = FieldNames(
    {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tools[].function.parameters": "tools[].input_schema",
        "tools[].function": "tools[]",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
    }
)

_OPTIONS = ConfigDict(strict=True, extra="allow", frozen=True)


class Thinking(BaseModel):
    model_config = _OPTIONS

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(BaseModel):
    model_config = _OPTIONS

    effort: str | None = None
    format: OutputFormat = None


class CountRequest(RequestFields):
    messages: Turns
    system: System = None
    tools: TurnTools = None
    tool_choice: TurnToolChoice = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None  # a label here: equal prefixes are shared without it


class MessagesRequest(CountRequest, StreamFields):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: TurnMetadata = None


DIALECTS: list[Dialect[Any]] = [
    Dialect("messages", "/v1/messages", MessagesRequest, NOT_OFFERED),
    Dialect("messages count", "/v1/messages/count_tokens", CountRequest, NOT_OFFERED),
]


def router(service: Service) -> APIRouter:
    router = APIRouter()
    server = service.config.server

    @router.post("/v1/messages")
    async def messages(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields: MessagesRequest = await read_fields(request, DIALECTS[0], server)
        service.check_model(fields.model)
        asked, prompt = await parse(service, fields)
        message_id = new_id("msg").replace("-", "_", 1)
        with NAMES.in_errors():
            turn = await ChatTask.begin(
                service, asked, prompt, response_id=message_id, max_tokens=fields.max_tokens, arrived=arrived
            )
        answer = _Answer(message_id, service.model_name, turn)
        ignored = NAMES.ignored(fields, asked)
        headers = {"request-id": request.scope["octavo.request_id"]}
        if fields.stream:
            ping = typed_event(output.Ping())
            return EventStream(
                service,
                answer.stream(),
                ignored,
                tell=error_event,
                keep_alive=ping,
                headers=headers,
                queued=[turn.request_id] if fields.wants_queue else (),
            )
        response = json_answer(await until_gone(service, request.receive, answer.collect()), ignored)
        response.headers.update(headers)
        return response

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        fields: CountRequest = await read_fields(request, DIALECTS[1], server)
        service.check_model(fields.model)
        asked, prompt = await parse(service, fields)
        return json_answer(output.TokenCount(len(prompt.ids)), NAMES.ignored(fields, asked))

    return router


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag="error"):
    error: AnthropicError
    request_id: str


def error_body(status: int, detail: ErrorDetail, request_id: str) -> AnthropicErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicErrorBody(AnthropicError(kind, detail.message), request_id)


def error_event(error: Exception, request_id: str) -> bytes:
    """What ended a stream that had begun."""
    status, body = describe(error, request_id)
    return typed_event(error_body(status, body.error, request_id))


ERROR_SHAPES["/v1/messages"] = error_body
_TEXT = {"type": "string"}
_DETAIL = {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]}
_ERROR = {
    "type": "object",
    "properties": {"type": {"const": "error"}, "error": _DETAIL, "request_id": _TEXT},
    "required": ["type", "error", "request_id"],
}
SHAPES = {
    "POST /v1/messages": Shape(output.Message, EVENTS, error=_ERROR),
    "POST /v1/messages/count_tokens": Shape(output.TokenCount, error=_ERROR),
}


# ── a request and its answer ────────────────────────────────────────────────────────────────────────


async def parse(service: Service, fields: CountRequest) -> tuple[chat_request.ChatRequest, chat_request.ChatPrompt]:
    choice, is_parallel = chat_tool_choice(fields.tool_choice)
    values: dict[str, Any] = {"messages": chat_messages(fields.system, fields.messages)}
    if fields.tools:
        values |= {"tools": chat_tools(fields.tools), "tool_choice": choice, "parallel_tool_calls": is_parallel}
    elif choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice wants a tool, but there are no tools", param="tool_choice")
    if fields.output_config is not None:
        values["reasoning_effort"] = fields.output_config.effort
        if fields.output_config.format is not None:
            values["response_format"] = _response_format(fields.output_config.format)
    if fields.thinking is not None:
        is_wanted = fields.thinking.type != "disabled"
        if is_wanted and service.text.formats.thinking is None and not any(map(service.text.template_reads, SWITCHES)):
            fields.pass_over(Field("thinking"), service.config.server)
        # Where a template has no switch and the model thinks all the same, its thoughts are left out.
        values |= {
            "chat_template_kwargs": dict.fromkeys(SWITCHES, is_wanted),
            "include_reasoning": is_wanted,
        }
    if values["messages"][-1]["role"] == "assistant":
        _check_prefill(fields, choice)
        values["continue_final_message"] = True
    if isinstance(fields, MessagesRequest):
        if fields.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {fields.max_tokens}", param="max_tokens")
        same = ("temperature", "top_p", "top_k", "stream")
        values |= {name: getattr(fields, name) for name in same} | fields.limits
        values["stop"] = fields.stop_sequences
    with NAMES.in_errors():
        asked = make_fields(chat_request.ChatRequest, values)
        return asked, await chat_request.parse(service, asked)


def _check_prefill(fields: CountRequest, choice: object) -> None:
    """An answer that goes on from the assistant's words begins in the middle: nothing else may say how it begins."""
    is_thinking = fields.thinking is not None and fields.thinking.type != "disabled"
    is_formed = fields.output_config is not None and fields.output_config.format is not None
    is_call = choice not in (None, "auto", "none")
    for is_so, param in ((is_thinking, "thinking"), (is_formed, "output_config.format"), (is_call, "tool_choice")):
        if is_so:
            raise InvalidRequest(
                f"messages ends with the assistant's own words, to be gone on with: {param} can not be had with that",
                param=param,
            )


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    match format:
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
        case _:
            raise InvalidRequest(
                'output_config.format must be {"type": "json_schema", "schema": {…}}', param="output_config.format"
            )


class _Answer:
    """One message, streamed or whole."""

    def __init__(self, message_id: str, model: str, turn: ChatTask) -> None:
        self._id, self._model, self._turn = message_id, model, turn
        self._blocks = output.Blocks()

    async def collect(self) -> output.Message:
        async with aclosing(self._turn.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._blocks.feed(part.event)
        self._blocks.finish()
        end = self._end()
        return self._message(self._blocks.blocks, end.stop_reason, end.stop_sequence)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        before = typed_event(output.MessageStart(self._message([], None, None))) + typed_event(output.Ping())
        async with aclosing(self._turn.parts()) as steps:
            async for parts in steps:
                for part in parts:
                    self._blocks.feed(part.event)
                yield before + self._told()
                before = b""
        self._blocks.finish()
        last = typed_event(output.MessageDelta(self._end(), self._usage()))
        yield before + self._told() + last + typed_event(output.MessageStop())

    def _told(self) -> bytes:
        return b"".join(map(typed_event, self._blocks.take_told()))

    def _message(
        self, blocks: list[output.Block], stop_reason: output.StopReason | None, stop_sequence: str | None
    ) -> output.Message:
        return output.Message(self._id, self._model, blocks, stop_reason, stop_sequence, self._usage())

    def _end(self) -> output.End:
        turn = self._turn
        if turn.is_cut and not turn.has_looped:
            return output.End("model_context_window_exceeded" if turn.filled_context else "max_tokens", None)
        if turn.finish_reason == "tool_calls":
            return output.End("tool_use", None)
        if isinstance(turn.stop_reason, str):
            return output.End("stop_sequence", turn.stop_reason)
        return output.End("end_turn", None)

    def _usage(self) -> output.MessageUsage:
        used, cached = self._turn.usage, self._turn.num_cached_tokens
        thought = output.OutputTokensDetails(self._turn.num_reasoning_tokens)
        return output.MessageUsage(used.prompt_tokens - cached, used.completion_tokens, thought, cached)
