"""Ollama's messages as OpenAI's. Ollama's calls have their arguments as objects, and often no ids: results of tools are matched to
calls by name and order."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import Field, InvalidRequest


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors of what is not looked at here come from the parser of chat requests."""
    open_calls = _OpenCalls()
    return [_message(message, Field("messages", at), open_calls) for at, message in enumerate(messages)]


class _OpenCalls:
    """The calls without a result so far."""

    def __init__(self) -> None:
        self._num_all = 0
        self._names: dict[str, str] = {}  # id → name, in the order of the calls
        self._ids: dict[str, deque[str]] = {}  # name → ids

    def add(self, call_id: str | None, name: str) -> str:
        """The id of a call: its own, or a new one."""
        call_id = call_id or f"call_{self._num_all}"
        self._num_all += 1
        self._names[call_id] = name
        self._ids.setdefault(name, deque()).append(call_id)
        return call_id

    def take(self, call_id: str | None, name: str | None) -> str | None:
        """The id of the call that a result belongs to: the given one, else that of the first open call of this name, or of any.
        None: there is none."""
        if not call_id and name:
            ids = self._ids.get(name, deque())
            while ids and ids[0] not in self._names:
                ids.popleft()
            call_id = ids[0] if ids else None
        elif not call_id:
            call_id = next(iter(self._names), None)
        if call_id:
            self._names.pop(call_id, None)
        return call_id


def _message(message: Mapping[str, Any], where: Field, open_calls: _OpenCalls) -> dict[str, Any]:
    made = {name: message[name] for name in ("role", "content") if name in message}
    is_result = made.get("role") == "tool"
    if made.get("content") is None and not is_result:
        made["content"] = ""
    if (thought := message.get("thinking")) is not None:
        made["reasoning_content"] = thought
    names = {name: _string(message.get(name), where / name) for name in ("tool_call_id", "tool_name")}
    if is_result:
        call_id = open_calls.take(names["tool_call_id"], names["tool_name"])
        made |= {"tool_call_id": call_id} if call_id else {}
        made |= {"name": names["tool_name"]} if names["tool_name"] else {}
    else:
        for name, value in names.items():
            if value:
                raise InvalidRequest(where / name + " is only for messages of role 'tool'")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(where / "tool_calls" + " must be a list")
        made["tool_calls"] = [_call(call, where / "tool_calls" / at, open_calls) for at, call in enumerate(calls)]
    return made


def _call(call: Any, where: Field, open_calls: _OpenCalls) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = function.get("arguments")
            if arguments is not None and not isinstance(arguments, dict):
                raise InvalidRequest(where / "function" / "arguments" + " must be an object")
            call_id = open_calls.add(_string(call.get("id"), where / "id"), name)
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}
    raise InvalidRequest(where + ' must be {"function": {"name", "arguments"}}')


def _string(value: object, where: Field) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(where + " must be a string")
    return value
