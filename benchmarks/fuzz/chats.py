"""Targets: a chat request's body as the one internal form: messages, tools, and what each dialect makes of its own."""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from benchmarks.fuzz.target import Target
from octavo.config import Config
from octavo.errors import OctavoError
from octavo.server.dialects.anthropic import blocks as anthropic
from octavo.server.dialects.openai_responses import request as responses
from octavo.server.dialects.openai_responses.items import chat_messages, read_input
from octavo.server.dialects.openai_responses.types import InputText, Item, MessageItem
from octavo.server.endpoints.compat import all_route_schemas
from octavo.server.generate.messages import parse_messages
from octavo.server.schema.fields import parse_body
from octavo.text.chat.tools import calls_schema, parse_tool_choice, parse_tools, template_form
from tests.doubles import byte_text

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}},
    "$defs": {"c": {"type": "string"}},
}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}  # fmt: skip
_MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "x"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}], "is_error": True}]},
        {"role": "assistant", "content": "And"},
    ],
    "tools": [{"name": "f", "description": "g", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
}  # fmt: skip
_RESPONSES: dict[str, Any] = {
    "instructions": "x",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "b"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
}  # fmt: skip
_UNUSED = (
    "image_url",
    "image",
    "input_image",
    "source",
    "base64",
    "data:,x",
    "file:///etc/passwd",
    "document",
    "web_search",
    "custom",
)
_BODIES = {"/v1/chat/completions": _CHAT, "/v1/messages": _MESSAGES, "/v1/responses": _RESPONSES}

BUDGET = Config().budget


@cache
def _routes() -> dict[str, Any]:
    return {route.path: route for route in all_route_schemas()}


def _find(wanted: str) -> Item | None:
    return MessageItem(wanted, "user", [InputText("Hi")]) if wanted == "msg_1" else None


def _run(path: str, data: bytes) -> None:
    fields: Any = parse_body(data, _routes()[path], Config())
    match path:
        case "/v1/messages":
            tool_choice, _ = anthropic.chat_tool_choice(fields.tool_choice)
            messages = anthropic.chat_messages(fields.system, fields.messages)
            tools = anthropic.chat_tools(fields.tools or [])
        case "/v1/responses":
            responses.check(fields, Config())
            messages = chat_messages(fields.instructions, read_input(fields.input, _find, BUDGET))
            chat = responses.chat_request(fields, messages, len(data))
            tools, tool_choice = chat.tools or [], chat.tool_choice
        case _:
            messages, tools, tool_choice = fields.messages, fields.tools or [], fields.tool_choice
    parsed = parse_tools(tools)
    calls_schema(parsed, parse_tool_choice(tool_choice, parsed))
    byte_text().render_chat(parse_messages(messages, BUDGET), tools=template_form(parsed))


def _words_in(value: Any) -> set[str]:
    match value:
        case dict():
            return set(value) | {word for member in value.values() for word in _words_in(member)}
        case list():
            return {word for member in value for word in _words_in(member)}
        case str():
            return {value}
    return set()


def _target(path: str) -> Target:
    """With small seeds too: of a large body, most mutations are refused before its messages are read."""
    body = _BODIES[path]
    turns = "input" if path == "/v1/responses" else "messages"
    least = {"max_tokens": 5} if path == "/v1/messages" else {}
    small = [{**least, turns: [entry]} for entry in body[turns]]
    small.append({**least, turns: "Hi" if turns == "input" else body[turns][:1], "tools": body["tools"]})
    seeds = [json.dumps(each).encode() for each in (body, *small)]
    return Target(
        f"chat {path}", seeds, partial(_run, path), (OctavoError,), [*sorted(_words_in(body)), *_UNUSED], is_json=True
    )


TARGETS: dict[str, Callable[[], Target]] = {f"chat{path}": partial(_target, path) for path in _BODIES}
