"""What a request to Anthropic's API may say, and the same as a chat request."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from octavo.errors import Field, InvalidRequest, quote
from octavo.server.dialects.anthropic.blocks import chat_messages, chat_tool_choice, chat_tools
from octavo.server.generate import chat_request
from octavo.server.generate.field_names import FieldNames
from octavo.server.generate.messages import MESSAGES, NONCE, are_nonces_dropped, without_nonce
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import check_text_len
from octavo.server.generate.retention import retention_in
from octavo.server.schema.fields import MAX_STOPS, RequestFields, StreamFields, make_fields
from octavo.server.schema.lists import AtMost
from octavo.server.schema.shapes import (
    CacheControl,
    OutputFormat,
    StructuredOutputs,
    System,
    TurnMetadata,
    Turns,
    TurnToolChoice,
    TurnTools,
)
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
"""Template variables that switch thinking on or off."""
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
    cache_control: CacheControl = None  # how long the pages stay: a hint


class MessagesRequest(CountRequest, StreamFields):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str] | None, AtMost(MAX_STOPS)] = None
    metadata: TurnMetadata = None
    structured_outputs: StructuredOutputs = None  # vLLM's, and what is to become of constraints that cannot be enforced


async def parse(service: Service, fields: CountRequest) -> tuple[chat_request.ChatFields, chat_request.ChatPrompt]:
    asked = await offload_prompt(fields.num_bytes, lambda: _chat_fields(service, fields))
    with NAMES.in_errors():
        return asked, await chat_request.parse(service, asked)


def _chat_fields(service: Service, fields: CountRequest) -> chat_request.ChatFields:
    check_text_len(service, fields.num_bytes, (fields.system, fields.messages, fields.tools), MESSAGES)
    choice, is_parallel = chat_tool_choice(fields.tool_choice)
    system: object = fields.system
    if are_nonces_dropped(service.config.server):
        system, had_nonce = without_nonce(system)
        if had_nonce:
            fields.pass_over(Field("system", NONCE), service.config)
    values: dict[str, Any] = {"messages": chat_messages(system, fields.messages)}
    whole = {"cache_control": fields.cache_control}
    values["prompt_cache_retention"] = retention_in(whole, fields.system, fields.messages, fields.tools)
    if fields.tools:
        values |= {"tools": chat_tools(fields.tools), "tool_choice": choice, "parallel_tool_calls": is_parallel}
    elif choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice requires a tool, but there are no tools", param="tool_choice")
    if fields.output_config is not None:
        values["reasoning_effort"] = fields.output_config.effort
        if fields.output_config.format is not None:
            values["response_format"] = _response_format(fields.output_config.format)
    if fields.thinking is not None:
        is_wanted = fields.thinking.type != "disabled"
        if is_wanted and service.text.formats.thinking is None and not any(map(service.text.template_reads, SWITCHES)):
            fields.pass_over(Field("thinking"), service.config)
        # Where the template has no switch and the model thinks anyway, its reasoning is left out of the answer.
        values |= {
            "chat_template_kwargs": {name: is_wanted for name in SWITCHES if service.text.template_reads(name)},
            "include_reasoning": is_wanted,
        }
    if values["messages"][-1]["role"] == "assistant":
        _check_prefill(fields, choice)
        values["continue_final_message"] = True
    if isinstance(fields, MessagesRequest):
        if fields.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {quote(fields.max_tokens)}", param="max_tokens")
        same = ("temperature", "top_p", "top_k", "stream")
        values |= {name: getattr(fields, name) for name in same} | fields.limits
        values["stop"] = fields.stop_sequences
        values["structured_outputs"] = fields.structured_outputs
    with NAMES.in_errors():
        return make_fields(chat_request.ChatFields, values, fields.num_bytes)


def _check_prefill(fields: CountRequest, choice: object) -> None:
    """Refuse fields that decide how an answer begins where it continues the assistant's text."""
    is_thinking = fields.thinking is not None and fields.thinking.type != "disabled"
    is_formed = fields.output_config is not None and fields.output_config.format is not None
    is_call = choice not in (None, "auto", "none")
    for is_so, param in ((is_thinking, "thinking"), (is_formed, "output_config.format"), (is_call, "tool_choice")):
        if is_so:
            raise InvalidRequest(
                f"messages ends with an assistant message, which is continued: {param} is not supported with that",
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
