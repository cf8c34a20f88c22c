"""Input of the Responses API → items, and items → chat messages."""

from collections.abc import Callable, Iterable
from typing import Any

from octavo.config import BudgetConfig
from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.server.dialects.openai_responses.output import item_id
from octavo.server.dialects.openai_responses.summary import read_summary
from octavo.server.dialects.openai_responses.types import (
    CallItem,
    CallOutputItem,
    CompactionItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)
from octavo.server.generate.messages import parse_arguments

ROLES = ("user", "assistant", "system", "developer")
MAX_CALL_ID_LEN = 256

Find = Callable[[str], Item | None]
"""Finds the item of an earlier response by its id."""


def read_input(value: object, find: Find, budget: BudgetConfig) -> list[Item]:
    """Parse `input`: a string is a user's message."""
    if isinstance(value, str):
        return [MessageItem(item_id("msg"), "user", [InputText(value)])]
    if not isinstance(value, list):
        raise InvalidRequest("input must be a string or a list of items", param="input")
    if not value:
        raise InvalidRequest("input is empty: at least one item is needed", param="input")
    return [_item(entry, f"input[{at}]", find, budget) for at, entry in enumerate(value)]


def references(value: object) -> set[str]:
    """Ids of earlier responses' items that an input refers to."""
    entries = value if isinstance(value, list) else []
    return {entry["id"] for entry in entries if _kind(entry) == "item_reference" and isinstance(entry.get("id"), str)}


def _kind(entry: object) -> object:
    if not isinstance(entry, dict):
        return None
    return entry.get("type") or ("message" if "role" in entry else "item_reference" if "id" in entry else None)


def _item(entry: object, where: str, find: Find, budget: BudgetConfig) -> Item:
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    match _kind(entry):
        case "message":
            return _message(entry, where)
        case "function_call":
            name, call_id = _text(entry, "name", where), _call_id(entry, where)
            return CallItem(_id(entry, "fc"), call_id, name, _arguments(entry, where, budget))
        case "function_call_output":
            return CallOutputItem(_id(entry, "fco"), _call_id(entry, where), _output(entry.get("output"), where))
        case "reasoning":
            return _reasoning(entry, where)
        case "compaction":
            content = _text(entry, "encrypted_content", where)
            read_summary(content, where)
            return CompactionItem(_id(entry, "cmp"), content)
        case "item_reference":
            item = find(_text(entry, "id", where))
            if item is None:
                raise InvalidRequest(
                    f"{where}.id: no stored response has this item: send the item itself", param=f"{where}.id"
                )
            return item
        case None:
            raise InvalidRequest(f"{where} must have a type or a role", param=where)
        case kind:
            raise Unsupported(
                f"{where}.type {str(kind)[:60]!r} is not supported here; supported are message, function_call, "
                "function_call_output, reasoning, compaction and item_reference",
                param=f"{where}.type",
            )


def _message(entry: dict[str, Any], where: str) -> MessageItem:
    role = entry.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = entry.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    return MessageItem(_id(entry, "msg"), role, parts)


def _part(part: object, where: str) -> InputText | OutputText | Refusal:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    match part.get("type"):
        case "input_text":
            return InputText(_text(part, "text", where))
        case "output_text":
            return OutputText(_text(part, "text", where))
        case "refusal":
            return Refusal(_text(part, "refusal", where))
        case str(kind):
            raise Unsupported(
                f"{where}.type {kind[:60]!r} is not supported: this model supports only text", param=f"{where}.type"
            )
        case _:
            raise InvalidRequest(
                f"{where}.type must be 'input_text', 'output_text' or 'refusal'", param=f"{where}.type"
            )


def _reasoning(entry: dict[str, Any], where: str) -> ReasoningItem:
    if entry.get("encrypted_content"):
        raise Unsupported(
            f"{where}.encrypted_content is not supported here: leave it out and send the reasoning in content",
            param=f"{where}.encrypted_content",
        )
    content = [ReasoningText(text) for text in _texts(entry.get("content"), f"{where}.content")]
    summary = [SummaryText(text) for text in _texts(entry.get("summary"), f"{where}.summary")]
    return ReasoningItem(_id(entry, "rs"), content, summary)


def _output(value: object, where: str) -> str | list[InputText]:
    return value if isinstance(value, str) else [InputText(text) for text in _texts(value, f"{where}.output")]


def _texts(value: object, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list of parts with text", param=where)
    texts = []
    for at, part in enumerate(value):
        if isinstance(part, dict) and part.get("type") in ("input_image", "input_file"):
            kind = f"{where}[{at}].type"
            raise Unsupported(f"{kind} {part['type']!r} is not supported: text only", param=kind)
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{at}].text must be a string", param=f"{where}[{at}].text")
        texts.append(part["text"])
    return texts


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value


def _arguments(entry: dict[str, Any], where: str, budget: BudgetConfig) -> str:
    text = _text(entry, "arguments", where)
    parse_arguments(text, Field(f"{where}.arguments"), budget)
    return text


def _call_id(entry: dict[str, Any], where: str) -> str:
    call_id = _text(entry, "call_id", where)
    if not 0 < len(call_id) <= MAX_CALL_ID_LEN:
        raise InvalidRequest(f"{where}.call_id must have 1 to {MAX_CALL_ID_LEN} characters", param=f"{where}.call_id")
    return call_id


def _id(entry: dict[str, Any], prefix: str) -> str:
    given = entry.get("id")
    return given if isinstance(given, str) and given else item_id(prefix)


# ── items → messages ────────────────────────────────────────────────────────────────────────────────


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat API has them. One assistant turn (reasoning, text, calls) becomes one message, and so do the
    instructions and the system messages that open the conversation: templates expect it so."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}  # call id → tool
    opening: list[str] = []  # texts after the first of the system message that opens the conversation
    for item in items:
        last = messages[-1] if messages else {}
        is_open = last.get("role") == "assistant"
        match item:
            case MessageItem(role="assistant"):
                if is_open and last["content"] is None and "tool_calls" not in last:
                    last["content"] = _words(item)
                else:
                    messages.append({"role": "assistant", "content": _words(item)})
            case MessageItem(role=role) if role in ("system", "developer"):
                if len(messages) == 1 and last["role"] == "system":
                    opening.append(_words(item))
                else:
                    messages.append({"role": "system", "content": _words(item)})
            case MessageItem():
                messages.append({"role": "user", "content": _words(item)})
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or item.summary)
                messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case CallItem():
                names[item.call_id] = item.name
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if is_open:
                    last.setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case CallOutputItem():
                messages.append(_result(item, names))
            case CompactionItem():
                summary = read_summary(item.encrypted_content, "input")
                messages.append({"role": "assistant", "content": f"Summary of our conversation so far:\n{summary}"})
    if opening:
        messages[0]["content"] = "\n\n".join([messages[0]["content"], *opening])
    return messages


def _words(item: MessageItem) -> str:
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in item.content)


def _result(item: CallOutputItem, names: dict[str, str]) -> dict[str, Any]:
    if item.call_id not in names:
        raise InvalidRequest(
            f"input has a function_call_output with call_id {item.call_id[:60]!r}, but no earlier function_call has that call_id",
            param="input",
        )
    output = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": output}
