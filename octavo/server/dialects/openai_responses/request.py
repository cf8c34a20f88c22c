"""What a request to the Responses API may say, and the same as a chat request."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from octavo.config import Config
from octavo.errors import Field, InvalidRequest, Unsupported, quote
from octavo.server.dialects.openai_responses.types import ResponseTool
from octavo.server.generate.chat_request import ChatFields
from octavo.server.generate.field_names import FieldNames
from octavo.server.schema.fields import (
    MAX_METADATA,
    QueueOptions,
    RequestFields,
    Retention,
    SamplingFields,
    StreamFields,
    check_metadata,
    make_fields,
)
from octavo.server.schema.lists import AtMost
from octavo.server.schema.shapes import Input, ResponseToolChoice, ResponseTools, TextFormat
from octavo.text.chat.tools import parse_tools

# Limits of the response schema, which returns these fields.
MAX_TEMPERATURE = 2
MAX_NUMBER = 2**53 - 1  # the largest that every JSON reader keeps exact
MAX_SAFETY_IDENTIFIER = 64  # characters
MAX_LABEL_LEN = 1024  # characters of user and prompt_cache_key, which a response returns
MAX_INCLUDED = 64

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED_REASONING,
    # Of tools and inputs that are not offered, so that there is never anything to include.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "reasoning.context": ("auto",),
    "reasoning.generate_summary": (),
    "reasoning.mode": ("standard",),
    "reasoning.summary": (),
    "service_tier": ("auto", "default"),
    "stream_options.include_obfuscation": (False,),
    "text.verbosity": ("medium",),
    # vLLM's own
    "chat_template": (),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
    "request_id": (),
    "vllm_xargs": ({},),
}

_OPTIONS = ConfigDict(strict=True, extra="allow", frozen=True)


class TextOptions(BaseModel):
    model_config = _OPTIONS

    format: TextFormat = None


class ReasoningOptions(BaseModel):
    model_config = _OPTIONS

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseStreamOptions(QueueOptions):
    resumable: bool | None = None  # ours: the stream can be resumed on another connection


class InputRequest(SamplingFields):
    """The fields that make a prompt and say how it continues: enough to count its tokens."""

    input: Input = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the server runs: there are none
    top_logprobs: int | None = None
    include: Annotated[list[str] | None, AtMost(MAX_INCLUDED)] = None
    tools: ResponseTools = None
    tool_choice: ResponseToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    priority: int | None = None  # vLLM's: lower goes first, where the server schedules by priority
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # How long its pages stay: a hint.
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    cache_salt: str | None = None  # vLLM's: it shares prefixes only with requests that have the same
    # Labels for the caller's own use: accepted, without effect.
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, AtMost(MAX_METADATA)] = None
    safety_identifier: str | None = None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


class ResponsesRequest(InputRequest, StreamFields):
    stream_options: ResponseStreamOptions | None = None

    @property
    def wants_resumable(self) -> bool:
        return bool(self.stream_options and self.stream_options.resumable)


NAMES = FieldNames(
    {
        "messages": "input",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "tools[].function": "tools[]",
    }
)


def check(fields: InputRequest, config: Config) -> None:
    """Check what the schema cannot express."""
    for name in fields.include or ():
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include: {name[:60]!r} is not one of {', '.join(INCLUDABLE)}", param="include")
    if ENCRYPTED_REASONING in (fields.include or ()):
        fields.pass_over(Field("include", ENCRYPTED_REASONING), config)
    for name, value, least in (
        ("max_output_tokens", fields.max_output_tokens, 1),
        ("max_tool_calls", fields.max_tool_calls, 1),
        ("top_logprobs", fields.top_logprobs, 0),
    ):
        if value is not None and not least <= value <= MAX_NUMBER:
            raise InvalidRequest(f"{name} must be between {least} and {MAX_NUMBER}, got {quote(value)}", param=name)
    if (fields.top_logprobs or 0) > config.budget.max_logprobs:
        limit = f"between 0 and {config.budget.max_logprobs} (--max-logprobs)"
        raise InvalidRequest(f"top_logprobs must be {limit}, got {quote(fields.top_logprobs)}", param="top_logprobs")
    if not 0 <= (fields.temperature or 0) <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be between 0 and {MAX_TEMPERATURE}, got {fields.temperature}", param="temperature"
        )
    if len(fields.safety_identifier or "") > MAX_SAFETY_IDENTIFIER:
        raise InvalidRequest(
            f"safety_identifier must have at most {MAX_SAFETY_IDENTIFIER} characters", param="safety_identifier"
        )
    for name in ("user", "prompt_cache_key"):
        if len(getattr(fields, name) or "") > MAX_LABEL_LEN:
            raise InvalidRequest(f"{name} must have at most {MAX_LABEL_LEN} characters", param=name)
    check_metadata(fields.metadata or {})


def chat_request(fields: InputRequest, messages: list[dict[str, Any]], num_bytes: int) -> ChatFields:
    """`num_bytes`: of the request, and of the conversation before it."""
    tools, choice = chat_tools(fields)
    values: dict[str, Any] = {"messages": messages, "priority": fields.priority}
    values |= {"prompt_cache_key": fields.prompt_cache_key, "prompt_cache_retention": fields.prompt_cache_retention}
    values["cache_salt"] = fields.cache_salt
    if isinstance(fields, ResponsesRequest):
        values |= {"stream": fields.stream, **fields.limits}
    if fields.wants_logprobs:
        values |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    if tools:
        values |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": fields.parallel_tool_calls}
    if (format := response_format(fields)) is not None:
        values["response_format"] = format
    if fields.effort is not None:
        values["reasoning_effort"] = fields.effort
    if fields.chat_template_kwargs:
        values["chat_template_kwargs"] = fields.chat_template_kwargs
    # The same validators have checked these already.
    sampling = {name: getattr(fields, name) for name in SamplingFields.model_fields.keys() - RequestFields.model_fields}
    return make_fields(ChatFields, values, num_bytes, sampling)


def response_format(fields: InputRequest) -> dict[str, Any] | None:
    """The chat API's response_format. None: text."""
    format = fields.text.format if fields.text else None
    match (format or {}).get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            inner = {key: value for key, value in (format or {}).items() if key != "type"}
            return {"type": "json_schema", "json_schema": inner}
        case _:
            raise InvalidRequest(
                "text.format.type must be 'text', 'json_object' or 'json_schema'", param="text.format.type"
            )


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────


def chat_tools(fields: InputRequest) -> tuple[list[dict[str, Any]], object]:
    """(tools, tool_choice) as the chat API has them."""
    tools = [_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(fields.tools or ())]
    parse_tools(tools)  # all of them: the response returns those that are not allowed now, too
    match fields.tool_choice:
        case None | "none" | "auto":
            return tools, fields.tool_choice
        case "required":
            if not tools:
                raise InvalidRequest("tool_choice is 'required', but there are no tools", param="tool_choice")
            return tools, "required"
        case {"type": "function", "name": str(name)}:
            if not any(tool["function"]["name"] == name for tool in tools):
                raise _not_in_tools(name)
            return tools, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*chosen]} if chosen:
            names = [_allowed_name(entry) for entry in chosen]
            by_name = {tool["function"]["name"]: tool for tool in tools}
            for name in names:
                if name not in by_name:
                    raise _not_in_tools(name)
            return [by_name[name] for name in dict.fromkeys(names)], mode
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise Unsupported(
                f"tool_choice.type {kind[:60]!r} is not supported here: only functions are", param="tool_choice.type"
            )
        case _:
            raise InvalidRequest(
                "tool_choice must be 'none', 'auto', 'required', a function by its name, or allowed_tools",
                param="tool_choice",
            )


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise Unsupported(
            f"{where}.type {str(kind)[:60]!r} is not supported here: only 'function' is", param=f"{where}.type"
        )
    if "function" in tool:
        raise InvalidRequest(
            f"{where}: name, description and parameters must be beside 'type', not inside 'function'", param=where
        )
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in kept if tool.get(key) is not None}}


def _not_in_tools(name: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice names {name[:60]!r}, which is not in tools", param="tool_choice")


def _allowed_name(entry: object) -> str:
    match entry:
        case {"type": "function", "name": str(name)}:
            return name
        case _:
            raise InvalidRequest(
                'tool_choice.tools must be a list of {"type": "function", "name": …}', param="tool_choice"
            )


def shown_tools(fields: ResponsesRequest) -> list[ResponseTool]:
    """The tools as a response returns them."""
    return [
        ResponseTool(tool["name"], tool.get("description"), tool.get("parameters") or {}, bool(tool.get("strict")))
        for tool in fields.tools or ()
    ]
