"""[name(key=value, …), …] as the whole output, with values in Python syntax: Llama 3.2 and 4, ToolACE, Olmo. Nothing is
evaluated: only literals are accepted. The name must be a tool of the request, because there is no mark."""

import re
from typing import Any

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import load
from octavo.text.parsers.reader import Call, Malformed, Reader, Steps, find, literal, name, peek, run, skip_space

_MAX_DEPTH = 50  # nesting; each level is a generator that every piece of text passes through
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}  # how many digits follow


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    yield from skip_space(reader)
    yield from literal(reader, "[")
    mark = ","
    while mark == ",":
        yield from skip_space(reader)
        call = yield from _call(reader)
        if call.name not in tools:
            raise Malformed
        mark = ""
        if (yield from skip_space(reader)):
            mark = yield from literal(reader, ",", "]")
        yield call
    end = reader.at
    yield from skip_space(reader)
    if not opening or not (yield from find(reader, ("<|python_end|>",))):
        reader.at = end


def _call(reader: Reader) -> Steps[Call]:
    tool = yield from name(reader)
    yield from literal(reader, "(")
    arguments: dict[str, Any] = {}
    while (yield from skip_space(reader)) != ")":
        key = yield from name(reader)
        yield from skip_space(reader)
        yield from literal(reader, "=")
        if not key.isidentifier() or key in arguments:
            raise Malformed
        arguments[key] = yield from _value(reader, 0)
        yield from _comma(reader, ")")
    reader.at += 1
    return Call(tool, arguments)


def _comma(reader: Reader, end: str) -> Steps[None]:
    """Read the comma between two items or after the last; the end itself is left unread."""
    if (yield from skip_space(reader)) != end:
        yield from literal(reader, ",")


def _value(reader: Reader, depth: int) -> Steps[Any]:
    if depth > _MAX_DEPTH:
        raise Malformed
    character = yield from skip_space(reader)
    if character and character in "[({":
        reader.at += 1
        if character == "{":
            return (yield from _dict(reader, depth + 1))
        return (yield from _list(reader, "]" if character == "[" else ")", depth + 1))
    if character and character in "\"'":
        return (yield from _string(reader))
    return (yield from _word(reader))


def _list(reader: Reader, end: str, depth: int) -> Steps[list[Any]]:
    values = []
    while (yield from skip_space(reader)) != end:
        values.append((yield from _value(reader, depth)))
        yield from _comma(reader, end)
    reader.at += 1
    return values


def _dict(reader: Reader, depth: int) -> Steps[dict[str, Any]]:
    values = {}
    while (character := (yield from skip_space(reader))) != "}":
        if not character or character not in "\"'":  # JSON has no other keys
            raise Malformed
        key = yield from _string(reader)
        yield from skip_space(reader)
        yield from literal(reader, ":")
        values[key] = yield from _value(reader, depth)
        yield from _comma(reader, "}")
    reader.at += 1
    return values


def _word(reader: Reader) -> Steps[Any]:
    word = yield from run(reader, _WORD)
    if word in _WORDS:
        return _WORDS[word]
    if not _NUMBER.fullmatch(word):
        raise Malformed
    sign, digits = ("-" if word[0] == "-" else ""), word.lstrip("+-")
    if digits.isdigit():
        return load(sign + (digits.lstrip("0") or "0"))
    mantissa, _, exponent = digits.lower().partition("e")
    integer, _, part = mantissa.partition(".")
    return load(f"{sign}{integer.lstrip('0') or '0'}.{part or '0'}e{exponent or '0'}")


def _string(reader: Reader) -> Steps[str]:
    quote = yield from literal(reader, '"""', "'''", '""', "''", '"', "'")
    if len(quote) == 2:
        return ""
    unquoted = re.compile(rf"[^{quote[0]}\\]*")
    parts = []
    while not (yield from find(reader, (quote,))):
        found = unquoted.match(reader.text, reader.at)
        assert found is not None  # the pattern matches the empty text
        reader.at = found.end()
        parts.append(found[0])
        character = yield from peek(reader)
        if not character:
            raise Malformed
        if character == "\\":
            parts.append((yield from _escape(reader)))
        elif not found[0]:  # one quote within three
            reader.at += 1
            parts.append(character)
    return "".join(parts)


def _escape(reader: Reader) -> Steps[str]:
    reader.at += 1
    kind = yield from peek(reader)
    if not kind:
        raise Malformed
    reader.at += 1
    if kind not in _CODES:
        # As in Python, an unknown escape stands for itself.
        return _ESCAPES.get(kind, kind if kind in "\\\"'" else "\\" + kind)
    digits = ""
    while len(digits) < _CODES[kind]:
        digit = yield from peek(reader)
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise Malformed
        digits += digit
        reader.at += 1
    if int(digits, 16) > 0x10FFFF:
        raise Malformed
    return chr(int(digits, 16))


FORMAT = ToolFormat(
    _read,
    openings=("<|python_start|>",),
    bare="[",
    marks=("<|python_start|>", "<|python_end|>"),
    signs=("func_name1(params_name1",),
    rank=1,
    aliases=("llama4_pythonic",),
)
