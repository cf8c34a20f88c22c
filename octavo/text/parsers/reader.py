"""A growing text and the steps that read it: generators that stop where the text does and go on when there is more.
Knows nothing of formats. A step never decides on text that is still to come, so no decision depends on the pieces."""

import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.\-/:]*")
_MAX_NAME = 256  # characters; the longest names in use have some sixty


class Malformed(Exception):
    """The text is no call after all: it belongs to the content."""


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    id: str | None = None  # None: the model gave none


T = TypeVar("T")
Steps = Generator[Call | None, None, T]
"""Yields None where it needs more text, and each call as soon as it is complete: what was read so far is then spent."""


class Reader:
    __slots__ = ("at", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what lies before has been read
        self.over = False  # no more text will come


def more(reader: Reader) -> Steps[bool]:
    """Waits for text beyond what is there. False: there will be none."""
    size = len(reader.text)
    while len(reader.text) == size:
        if reader.over:
            return False
        yield None
    return True


def peek(reader: Reader) -> Steps[str]:
    """The next character, unread; "" at the end of the text."""
    while reader.at == len(reader.text):
        if not (yield from more(reader)):
            return ""
    return reader.text[reader.at]


def skip_space(reader: Reader) -> Steps[str]:
    """The first character that is no space, unread; "" at the end of the text."""
    while (character := (yield from peek(reader))) and character in SPACE:
        reader.at += 1
    return character


def find(reader: Reader, options: Sequence[str]) -> Steps[str]:
    """Reads the one of `options` that comes next, the longest where several do. "": none, and nothing was read."""
    while True:
        rest = reader.text[reader.at : reader.at + max(map(len, options))]
        if not reader.over and any(len(rest) < len(option) and option.startswith(rest) for option in options):
            yield from more(reader)
            continue
        found = max((option for option in options if rest.startswith(option)), key=len, default="")
        reader.at += len(found)
        return found


def literal(reader: Reader, *options: str) -> Steps[str]:
    """Reads one of these, or the text is malformed."""
    found = yield from find(reader, options)
    if not found:
        raise Malformed
    return found


def until(reader: Reader, mark: str) -> Steps[str]:
    """Reads up to the mark and the mark itself; gives what came before it."""
    start = searched = reader.at
    while (end := reader.text.find(mark, searched)) < 0:
        searched = max(start, len(reader.text) - len(mark) + 1)
        if not (yield from more(reader)):
            raise Malformed
    reader.at = end + len(mark)
    return reader.text[start:end]


def name(reader: Reader) -> Steps[str]:
    """Reads the longest run of characters that names of tools are made of: at least one."""
    found = yield from run(reader, _NAME, _MAX_NAME)
    if not found:
        raise Malformed
    return found


def run(reader: Reader, pattern: re.Pattern[str], max_len: int | None = None) -> Steps[str]:
    """Reads the longest run of what `pattern` matches, which matches the empty text too. A longer one than `max_len` is malformed,
    and nobody waits for its end."""
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
