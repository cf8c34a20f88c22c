"""Parses the messages of a chat request into the form that templates expect: roles, names, tool calls, results of tools.

octavo/text checks the content."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.config import BudgetConfig, ServerConfig
from octavo.errors import Field, InvalidRequest, RequestError, Unsupported
from octavo.server.schema.json_size import check_json

MESSAGES = Field("messages")
_HERE = Field()  # a message itself: the path of its fields begins there
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""developer is OpenAI's newer name of system; templates of open models know only the older one."""

REASONING = ("reasoning_content", "reasoning")
"""Two names for a model's reasoning before an answer. Templates read either."""
_OF_ROLE = {
    "assistant": {"tool_calls", "refusal", *REASONING},
    "tool": {"tool_call_id"},
}
"""Fields that only messages of one role have."""

NONCE = "x-anthropic-billing-header"
"""A line that Claude Code puts before its system prompt and changes in every request: with it no two requests would
share a prefix. It comes in /v1/messages, and in /v1/chat/completions through proxies that translate."""
_NONCES = re.compile(rf"\A({NONCE}:[^\n]*(\n+|\Z))+")


def parse_messages(values: Sequence[Mapping[str, Any]], budget: BudgetConfig) -> list[dict[str, Any]]:
    if not values:
        raise InvalidRequest(MESSAGES + " is empty: at least one message is needed")
    messages: list[dict[str, Any]] = []
    for at, value in enumerate(values):
        try:
            messages.append(parse_message(value, budget))
        except RequestError as error:
            error.rename(_within(at))
            raise
    name_of: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            name_of[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and (name := name_of.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)  # some templates write the name of the tool that answered
    return messages


def _within(at: int) -> Callable[[Field], Field]:
    """Return a function that renames a field of a message to that of the request."""
    return lambda field: Field("messages", at, *field.path)


def parse_message(message: Mapping[str, Any], budget: BudgetConfig) -> dict[str, Any]:
    """Errors name fields by their path within the message."""
    role = message.get("role")
    if role == "function":
        raise Unsupported(Field("role") + " 'function' is not supported: use 'tool'")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(Field("role") + f" must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and role in ("assistant", "tool")):
        raise InvalidRequest(Field("content") + " must be a string or a list of parts")
    _check_role(message)
    if role == "assistant":
        content = _with_refusals(message, content)
    parsed = {"role": ROLES[role], "content": content}
    if (name := _string(message, "name")) is not None:
        parsed["name"] = name
    if role == "assistant":
        parsed |= _of_assistant(message, budget)
    if role == "tool" and (call_id := _string(message, "tool_call_id")) is not None:
        parsed["tool_call_id"] = call_id
    return parsed


def _check_role(message: Mapping[str, Any]) -> None:
    for role, names in _OF_ROLE.items():
        for name in names if message["role"] != role else ():
            if message.get(name) not in (None, [], ""):
                raise InvalidRequest(Field(name) + f" is not allowed in a message of role {message['role']!r}")


def _with_refusals(message: Mapping[str, Any], content: object) -> object:
    """The content with refusals as plain text: templates know no other kind."""
    if isinstance(content, list):
        return [
            {"type": "text", "text": _string(part, "refusal", Field("content", at)) or ""}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for at, part in enumerate(content)
        ]
    return content or _string(message, "refusal") or content


def _of_assistant(message: Mapping[str, Any], budget: BudgetConfig) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(Field("tool_calls") + " must be a list")
    if calls:
        parsed["tool_calls"] = [_call(call, Field("tool_calls", at), budget) for at, call in enumerate(calls)]
    thoughts = [text for key in REASONING if (text := _string(message, key))]
    if thoughts:
        parsed |= dict.fromkeys(REASONING, thoughts[0])
    return parsed


def _call(call: Any, where: Field, budget: BudgetConfig) -> dict[str, Any]:
    """A call with its arguments as an object, which templates iterate or format themselves."""
    match call:
        case {"function": {"name": str(name), **function}} if call.get("type", "function") == "function":
            call_id = call.get("id", "")
            if not isinstance(call_id, str):
                raise InvalidRequest(where / "id" + " must be a string")
            arguments = parse_arguments(function.get("arguments"), where / "function" / "arguments", budget)
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        case _:
            raise InvalidRequest(where + ' must be {"id", "type": "function", "function": {"name", "arguments"}}')


def parse_arguments(value: object, where: Field, budget: BudgetConfig) -> dict[str, Any]:
    """A call's arguments, which come as JSON in a string. The body's limits count for it, too: to the body it is one value."""
    if isinstance(value, str) and value.strip():
        try:
            check_json(value.encode("utf-8", "replace"), int(budget.max_json_items), budget.max_json_depth, where)
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = []
    if not value:
        value = {} if value is None or isinstance(value, str | dict) else value
    if not isinstance(value, dict):
        raise InvalidRequest(where + " must be a JSON object as a string")
    return value


def _string(message: Mapping[str, Any], key: str, where: Field = _HERE) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(where / key + " must be a string")
    return value


# ── lines that break prefixes ──


def are_nonces_dropped(server: ServerConfig) -> bool:
    """Strict mode honours or refuses: there the line stays."""
    return server.drop_client_nonces and not server.strict_fields


def without_nonce(system: object) -> tuple[object, bool]:
    """The system prompt, text or blocks, without the line, and whether it had one. Only whole lines at the very beginning are taken."""
    if isinstance(system, str):
        rest = _NONCES.sub("", system, count=1)
        return rest, rest != system
    if isinstance(system, list) and system and isinstance(system[0], dict) and isinstance(system[0].get("text"), str):
        first: dict[str, Any] = system[0]
        rest = _NONCES.sub("", first["text"], count=1)
        if rest != first["text"]:
            return ([{**first, "text": rest}] if rest.strip() else []) + system[1:], True
    return system, False


def drop_nonce(messages: list[dict[str, Any]]) -> bool:
    """Take the line from the system message that a conversation begins with. → whether there was one. A message that has nothing else goes, too,
    unless it is the only one."""
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return False
    content, had_nonce = without_nonce(first.get("content"))
    if had_nonce:
        messages[:1] = [{**first, "content": content}] if content or len(messages) == 1 else []
    return had_nonce
