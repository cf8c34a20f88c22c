"""[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or in newer models [TOOL_CALLS]NAME[ARGS]{…}: Mistral's models. The marks are
special tokens, which must not be skipped."""

import re

import msgspec

from octavo.text.parsers.calls import Schemas, ToolFormat, short_id
from octavo.text.parsers.json_text import call_of, load, object_text
from octavo.text.parsers.reader import Call, Malformed, Reader, Steps, find, literal, name, skip_space

_ID = re.compile(r"[A-Za-z0-9]{9}")


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    yield from skip_space(reader)
    if (yield from find(reader, ("[",))):
        yield from _array(reader)
    else:
        yield from _named(reader)


def _array(reader: Reader) -> Steps[None]:
    while True:
        yield from skip_space(reader)
        value = load((yield from object_text(reader)))
        call = call_of(value)
        given = value.get("id")
        if isinstance(given, str) and _ID.fullmatch(given):
            call = msgspec.structs.replace(call, id=given)
        yield from skip_space(reader)
        mark = yield from literal(reader, ",", "]")
        yield call
        if mark == "]":
            return


def _named(reader: Reader) -> Steps[None]:
    tool = yield from name(reader)
    given = None
    if (yield from find(reader, ("[CALL_ID]",))):
        given = yield from name(reader)
    yield from find(reader, ("[ARGS]",))
    yield from skip_space(reader)
    arguments = load((yield from object_text(reader)))
    if given is not None and not _ID.fullmatch(given):
        raise Malformed
    yield Call(tool, arguments, given)


FORMAT = ToolFormat(
    _read,
    openings=("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    signs=("[TOOL_CALLS]",),
    rank=1,
    new_id=short_id,
)
