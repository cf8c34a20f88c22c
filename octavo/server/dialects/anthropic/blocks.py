"""Anthropic's conversation (system, messages of content blocks, tools) → the messages and tools of a chat request."""

import json
from typing import Any

from octavo.errors import InvalidRequest, Unsupported


def chat_messages(system: object, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat API has them: a tool's result is a message of its own, a call is part of the assistant's."""
    converted: list[dict[str, Any]] = []
    if system is not None and (words := _system(system, "system")):
        converted.append({"role": "system", "content": words})
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    names: dict[str, str] = {}  # call id → tool
    for at, message in enumerate(messages):
        converted += _message(message, f"messages[{at}]", names)
    last = converted[-1]
    if last["role"] == "assistant" and (last.get("tool_calls") or not last["content"]):
        raise InvalidRequest(
            "messages ends with an assistant message, which is continued: it must end with text and must not call a tool",
            param="messages",
        )
    return converted


def _message(message: dict[str, Any], where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    content = message.get("content")
    match message.get("role"):
        case "user":
            return _user(_blocks(content, where), where, names)
        case "assistant":
            return [_assistant(_blocks(content, where), where, names)]
        case "system":
            return [{"role": "system", "content": _system(content, f"{where}.content")}]
        case _:
            raise InvalidRequest(f"{where}.role must be 'user' or 'assistant'", param=f"{where}.role")


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    return content


def _system(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise InvalidRequest(f"{where} must be a string or a list of text blocks", param=where)
    return "\n\n".join(_text(block, f"{where}[{at}]") for at, block in enumerate(value))


def _user(blocks: list[dict[str, Any]], where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    words: list[str] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        if block.get("type") == "tool_result":
            if words:
                converted.append({"role": "user", "content": "\n".join(words)})
                words = []
            converted.append(_result(block, place, names))
        else:
            words.append(_text(block, place))
    if words or not converted:
        converted.append({"role": "user", "content": "\n".join(words)})
    return converted


def _result(block: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    call = _string(block, "tool_use_id", where)
    if call not in names:
        raise InvalidRequest(
            f"{where}.tool_use_id {call[:60]!r} matches no earlier tool_use block", param=f"{where}.tool_use_id"
        )
    content = block.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        parts = _blocks(content, where)
        content = "\n".join(_text(part, f"{where}.content[{at}]") for at, part in enumerate(parts))
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise InvalidRequest(f"{where}.is_error must be true or false", param=f"{where}.is_error")
    # Templates have no place for the flag, so it is put into the text.
    words = f"Error: {content}" if is_error else content
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": words}


def _assistant(blocks: list[dict[str, Any]], where: str, names: dict[str, str]) -> dict[str, Any]:
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "tool_use":
                calls.append(_call(block, place, names))
            case _:
                words.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(words) if words else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    call, name = _string(block, "id", where), _string(block, "name", where)
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
    names[call] = name
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": call, "type": "function", "function": function}


def _text(block: dict[str, Any], where: str) -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}.type must be a string", param=f"{where}.type")
    if kind != "text":
        raise Unsupported(
            f"{where}.type {kind[:60]!r} is not supported here; only text blocks are", param=f"{where}.type"
        )
    return _string(block, "text", where)


def _string(block: dict[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as OpenAI's chat API has them. Names and schemas are checked later, with those of the chat API."""
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise Unsupported(
            f"{where}.type {str(kind)[:60]!r} is a tool that Anthropic runs, not supported here: give a tool with an input_schema",
            param=f"{where}.type",
        )
    if "input_schema" not in tool:
        raise InvalidRequest(f"{where}.input_schema is missing", param=f"{where}.input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    examples = tool.get("input_examples") or []
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise InvalidRequest(f"{where}.input_examples must be a list of objects", param=f"{where}.input_examples")
    if examples:
        words = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
        function["description"] = f"{function.get('description') or ''}\nExamples of its input:\n{words}".lstrip()
    return {"type": "function", "function": function}


def chat_tool_choice(choice: dict[str, Any] | None) -> tuple[object, bool]:
    """(tool_choice, parallel_tool_calls) as OpenAI's chat API has them."""
    if choice is None:
        return None, True
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise InvalidRequest(
            "tool_choice.disable_parallel_tool_use must be true or false",
            param="tool_choice.disable_parallel_tool_use",
        )
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, not is_single
        case "any":
            return "required", not is_single
        case "tool" if isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, not is_single
        case _:
            raise InvalidRequest(
                "tool_choice.type must be 'auto', 'any', 'none' or 'tool' with a name", param="tool_choice.type"
            )
