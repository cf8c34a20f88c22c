"""DeepSeek's calls between its own marks: V3 and R1 write a fenced object after the name, V3.1 a bare one. The marks contain the
fullwidth bar and the lower one eighth block."""

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import load, object_text
from octavo.text.parsers.reader import Call, Malformed, Reader, Steps, literal, name, peek, skip_space

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    yield from skip_space(reader)
    yield from literal(reader, _CALL)
    while True:
        call = yield from _call(reader)
        if (yield from skip_space(reader)):
            yield from literal(reader, _CALL_END)
        yield call
        if not (yield from skip_space(reader)):
            return
        if (yield from literal(reader, _CALL, _END)) == _END:
            return


def _call(reader: Reader) -> Steps[Call]:
    yield from skip_space(reader)
    head = yield from name(reader)
    yield from literal(reader, _SEPARATOR)
    if (yield from skip_space(reader)) == "{":
        return Call(head, load((yield from object_text(reader))))
    if head != "function":  # the only type of tool there is
        raise Malformed
    tool = yield from name(reader)
    yield from skip_space(reader)
    yield from literal(reader, "```json")
    yield from skip_space(reader)
    arguments = load((yield from object_text(reader)))
    if (yield from skip_space(reader)) == "`":
        yield from literal(reader, "```")
    elif (yield from peek(reader)):
        raise Malformed
    return Call(tool, arguments)


FORMAT = ToolFormat(
    _read,
    openings=(_BEGIN,),
    marks=(_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR),
    signs=(_BEGIN,),
    rank=3,
    aliases=("deepseek", "deepseek_v31"),
)
