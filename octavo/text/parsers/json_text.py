"""JSON inside an output: finds the end of an object while it is still being written, parses it and writes it. Models write raw
line breaks inside strings: these are accepted, and written as valid JSON."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from octavo.text.parsers.reader import Call, Malformed, Reader, Steps, is_name, peek, run, skip_space

_MAX_DEPTH = 100  # nesting, far below what Python's own parser can take, so the result never depends on the stack
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def object_text(reader: Reader) -> Steps[str]:
    """Read one JSON object and return its text. Raises Malformed at the first character that is invalid there."""
    start = reader.at
    if (yield from peek(reader)) != "{":
        raise Malformed
    reader.at += 1
    stack, due = ["}"], "key or end"  # the closing bracket of each open one; what may come next
    while stack:
        character = yield from skip_space(reader)
        if character == stack[-1] and due in ("key or end", "value or end", "comma or end"):
            reader.at += 1
            stack.pop()
            due = "comma or end"
        elif character == '"' and due.startswith(("key", "value")):
            yield from _string(reader)
            due = "colon" if due.startswith("key") else "comma or end"
        elif character == ":" and due == "colon":
            reader.at += 1
            due = "value"
        elif character == "," and due == "comma or end":
            reader.at += 1
            due = "key" if stack[-1] == "}" else "value"
        elif character and character in "{[" and due.startswith("value"):
            reader.at += 1
            stack.append("}" if character == "{" else "]")
            due = "key or end" if character == "{" else "value or end"
            if len(stack) > _MAX_DEPTH:
                raise Malformed
        elif due.startswith("value"):
            yield from _word(reader)
            due = "comma or end"
        else:
            raise Malformed
    return reader.text[start : reader.at]


def _string(reader: Reader) -> Steps[None]:
    reader.at += 1
    while True:
        found = _PLAIN.match(reader.text, reader.at)
        assert found is not None  # the pattern matches the empty text
        reader.at = found.end()
        match (yield from peek(reader)):
            case '"':
                reader.at += 1
                return
            case "\\":
                reader.at += 1
                if (yield from peek(reader)) not in tuple('"\\/bfnrtu'):
                    raise Malformed
                reader.at += 1
            case "":
                raise Malformed


def _word(reader: Reader) -> Steps[None]:
    """Read a number, true, false or null."""
    word = yield from run(reader, _WORD)
    if word not in ("true", "false", "null") and not _NUMBER.fullmatch(word):
        raise Malformed


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def load(text: str) -> Any:
    """Parse a value that can be written as JSON again. NaN, infinities and numbers that overflow are malformed."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def dump(value: Mapping[str, Any]) -> str:
    """Write JSON that can be encoded as UTF-8: a lone surrogate stays escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def call_of(value: object, *, must_say_arguments: bool = False) -> Call:
    """The call described by an object {"name": …, "arguments" or "parameters": …}."""
    if not isinstance(value, dict) or not is_name(value.get("name")):
        raise Malformed
    said = [key for key in ("arguments", "parameters") if key in value]
    if len(said) > 1 or (must_say_arguments and not said):
        raise Malformed
    arguments = value[said[0]] if said else None
    if isinstance(arguments, str):  # as in OpenAI's API: JSON text within JSON
        arguments = load(arguments)
    if arguments is None and not must_say_arguments:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed
    return Call(value["name"], arguments)
