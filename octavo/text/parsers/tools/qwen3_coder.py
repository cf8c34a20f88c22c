"""<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>: Qwen3-Coder and others. Values are bare
text: only the tool's schema tells which of them are numbers, lists or objects."""

import re
from collections.abc import Mapping
from typing import Any

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import load
from octavo.text.parsers.reader import SPACE, Call, Malformed, Reader, Steps, literal, more, name, skip_space, until

_MARK = "</parameter>"
_FOLLOWERS = ("<parameter=", "</function>")
_VALUE_END = re.compile(rf"{_MARK}(?=[{SPACE}]*(?:{'|'.join(_FOLLOWERS)}))")


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    if opening == "<tool_call>":
        yield from skip_space(reader)
        yield from literal(reader, "<function=")
    tool = yield from name(reader)
    yield from literal(reader, ">")
    schema = tools.get(tool, {}).get("properties")
    properties = schema if isinstance(schema, Mapping) else {}
    arguments: dict[str, Any] = {}
    yield from skip_space(reader)
    while (yield from literal(reader, *_FOLLOWERS)) == "<parameter=":
        key = yield from until(reader, ">")
        if not key or "\n" in key or "<" in key or key in arguments:
            raise Malformed
        arguments[key] = _value((yield from _text(reader)), properties.get(key))
        yield from skip_space(reader)
    if opening == "<tool_call>" and (yield from skip_space(reader)):
        yield from literal(reader, "</tool_call>")
    yield Call(tool, arguments)


def _text(reader: Reader) -> Steps[str]:
    """Read a value up to the mark that is followed by another parameter or the end; any other such mark is part of the value.

    One regex searches for it, for speed: a model that repeats itself may write thousands of such marks.
    """
    start = searched = reader.at
    while (found := _VALUE_END.search(reader.text, searched)) is None:
        searched = _undecided(reader.text, searched)
        if not (yield from more(reader)):
            raise Malformed
    reader.at = found.end()
    return reader.text[start : found.start()].removeprefix("\n").removesuffix("\n")


def _undecided(text: str, searched: int) -> int:
    """Position from which to search again for the end of the value when more text has come."""
    last = text.rfind(_MARK, searched)
    if last >= 0:
        tail = text[last + len(_MARK) :].lstrip(SPACE)
        if any(follower.startswith(tail) for follower in _FOLLOWERS):
            return last
        searched = last + len(_MARK)
    return max(searched, len(text) - len(_MARK) + 1)


def _value(text: str, schema: object) -> Any:
    """Convert the text to the schema's type. It stays text if the schema allows that or names no type, or if it does not match."""
    kinds = _kinds(schema)
    if not kinds or (kinds == {"string"}):
        return text
    if kinds == {"boolean"} and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = load(text)
    except Malformed:
        return text
    return value if _kind(value) & kinds else text


def _kinds(schema: object) -> set[str]:
    """Every type that a schema names, at its top or in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds(option)
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = set().union(*(_kind(value) for value in schema["enum"]))
    return kinds


def _kind(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return set()  # a quoted string keeps its quotes
        case list():
            return {"array"}
        case _:
            return {"object"}


FORMAT = ToolFormat(
    _read,
    openings=("<tool_call>", "<function="),
    marks=("<tool_call>", "</tool_call>"),
    signs=("<function=", "<parameter="),
    rank=2,
    aliases=("qwen3_xml",),
)
