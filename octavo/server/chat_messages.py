"""The messages of a chat request as templates know them: roles, names, tool calls with their arguments, results of tools.
Knows nothing of templates or of HTTP; the text room checks what the content says."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequest, Unsupported

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""developer is OpenAI's newer name of system; the templates of open models know only the older one."""

NOT_OFFERED = {"audio", "refusal", "annotations"}
"""Keys of a message that clients send back as null or empty from an earlier answer."""
REASONING = ("reasoning_content", "reasoning")
"""Two names of one thing: what a model thought before it answered. Templates read either."""
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", *REASONING}


def parse_messages(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not values:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    messages = [parse_message(value, f"messages[{at}]") for at, value in enumerate(values)]
    name_of: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            name_of[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and (name := name_of.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)  # some templates write which tool it was that answered
    return messages


def parse_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise Unsupported(f"{where}.role 'function' is the older form of 'tool': send that", param=f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and role in ("assistant", "tool")):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    _refuse_others(message, where)
    parsed = {"role": ROLES[role], "content": content}
    if (name := _string(message, "name", where)) is not None:
        parsed["name"] = name
    if role == "assistant":
        parsed |= _of_assistant(message, where)
    if role == "tool" and (call_id := _string(message, "tool_call_id", where)) is not None:
        parsed["tool_call_id"] = call_id
    return parsed


def _refuse_others(message: Mapping[str, Any], where: str) -> None:
    if message.get("function_call"):
        param = f"{where}.function_call"
        raise Unsupported(f"{param} is the older form of tool_calls: send those", param=param)
    own = {"assistant": {"tool_calls", *REASONING}, "tool": {"tool_call_id"}}.get(message["role"], set())
    for key, value in message.items():
        is_empty = value in (None, [], "")
        if key not in _KNOWN and not (key in NOT_OFFERED and is_empty):
            raise Unsupported(f"{where}.{key[:60]} is not supported here", param=f"{where}.{key[:60]}")
        if key in ("tool_calls", "tool_call_id", *REASONING) and key not in own and not is_empty:
            raise InvalidRequest(
                f"{where}.{key} does not belong to a message of role {message['role']!r}", param=f"{where}.{key}"
            )


def _of_assistant(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    if calls:
        parsed["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    thoughts = [text for key in REASONING if (text := _string(message, key, where))]
    if thoughts:
        parsed |= dict.fromkeys(REASONING, thoughts[0])
    return parsed


def _call(call: Any, where: str) -> dict[str, Any]:
    """With its arguments as an object: templates want to look into them, or write them in their own way."""
    match call:
        case {"function": {"name": str(name), **function}} if call.get("type", "function") == "function":
            call_id = call.get("id", "")
            if not isinstance(call_id, str):
                raise InvalidRequest(f"{where}.id must be a string", param=f"{where}.id")
            arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        case _:
            raise InvalidRequest(
                f'{where} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}', param=where
            )


def _arguments(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = []
    if not value:
        value = {} if value is None or isinstance(value, str | dict) else value
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be the text of a JSON object", param=where)
    return value


def _string(message: Mapping[str, Any], key: str, where: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value
