"""Reader: a growing text, and generators that read it. They stop at the end of the text and continue when there is more. They
never decide on text that is still to come, so the result does not depend on how the text was cut."""

import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.\-/:]*")
_MAX_NAME = 256  # characters; the longest names in use have some sixty


class Malformed(Exception):
    """The text is not a call: it belongs to the content."""


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    id: str | None = None  # None: the model gave none


T = TypeVar("T")
Steps = Generator[Call | None, None, T]
"""A generator that yields None when it needs more text, and each call as soon as it is complete. Text read so far is then
consumed."""


class Reader:
    __slots__ = ("at", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # the text before this position has been read
        self.over = False  # no more text will come


def more(reader: Reader) -> Steps[bool]:
    """Wait for more text. False: there will be none."""
    size = len(reader.text)
    while len(reader.text) == size:
        if reader.over:
            return False
        yield None
    return True


def peek(reader: Reader) -> Steps[str]:
    """Return the next character without reading it; "" at the end of the text."""
    while reader.at == len(reader.text):
        if not (yield from more(reader)):
            return ""
    return reader.text[reader.at]


def skip_space(reader: Reader) -> Steps[str]:
    """Skip space and return the next character without reading it; "" at the end of the text."""
    while (character := (yield from peek(reader))) and character in SPACE:
        reader.at += 1
    return character


def find(reader: Reader, options: Sequence[str]) -> Steps[str]:
    """Read the one of `options` that comes next, the longest if several match. "": none does, and nothing was read."""
    while True:
        rest = reader.text[reader.at : reader.at + max(map(len, options))]
        if not reader.over and any(len(rest) < len(option) and option.startswith(rest) for option in options):
            yield from more(reader)
            continue
        found = max((option for option in options if rest.startswith(option)), key=len, default="")
        reader.at += len(found)
        return found


def literal(reader: Reader, *options: str) -> Steps[str]:
    """Read one of the options, or raise Malformed."""
    found = yield from find(reader, options)
    if not found:
        raise Malformed
    return found


def until(reader: Reader, mark: str) -> Steps[str]:
    """Read up to and including the mark, and return the text before it."""
    start = searched = reader.at
    while (end := reader.text.find(mark, searched)) < 0:
        searched = max(start, len(reader.text) - len(mark) + 1)
        if not (yield from more(reader)):
            raise Malformed
    reader.at = end + len(mark)
    return reader.text[start:end]


def name(reader: Reader) -> Steps[str]:
    """Read the longest run of characters that are allowed in a tool's name: at least one."""
    found = yield from run(reader, _NAME, _MAX_NAME)
    if not found:
        raise Malformed
    return found


def run(reader: Reader, pattern: re.Pattern[str], max_len: int | None = None) -> Steps[str]:
    """Read the longest run that `pattern` matches; the pattern also matches the empty text. A run longer than `max_len` is
    malformed, without waiting for its end."""
    start = reader.at
    while True:
        found = pattern.match(reader.text, reader.at)
        assert found is not None
        reader.at = found.end()
        if max_len is not None and reader.at - start > max_len:
            raise Malformed
        if reader.at < len(reader.text) or not (yield from more(reader)):
            return reader.text[start : reader.at]


def is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME and _NAME.fullmatch(value) is not None
