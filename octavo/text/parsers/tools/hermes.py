"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and 3, and many others. Nothing is repaired: an object
that is not JSON, or more than one between the marks, is content.

Small models often leave the marks out, and models of code write a block of Markdown in their place. An output that consists of such
objects is taken for calls if each names a tool of the request: without a mark, only that distinguishes a call from other JSON."""

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import call_of, load, object_text
from octavo.text.parsers.reader import Malformed, Reader, Steps, find, literal, skip_space

_FENCE = "```"


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    if not opening:
        yield from _read_bare(reader, tools)
        return
    yield from skip_space(reader)
    call = call_of(load((yield from object_text(reader))))
    if (
        yield from skip_space(reader)
    ):  # the closing mark may be missing at the end of the text: the object is complete
        yield from literal(reader, "</tool_call>")
    yield call


def _read_bare(reader: Reader, tools: Schemas) -> Steps[None]:
    is_fenced = (yield from find(reader, (_FENCE,))) != ""
    if is_fenced and (yield from skip_space(reader)) != "{":
        yield from literal(reader, "json")
        yield from skip_space(reader)
    calls = []
    while True:
        start = reader.at
        yield from literal(reader, "{")
        yield from skip_space(reader)
        yield from literal(reader, '"name"', '"arguments"')  # other JSON is streamed, not held back to its end
        reader.at = start
        calls.append(call_of(load((yield from object_text(reader))), must_say_arguments=True))
        if calls[-1].name not in tools:
            raise Malformed
        following = yield from skip_space(reader)
        if not is_fenced or following != "{":  # a block may hold several
            break
    if is_fenced and following:  # the block may be open at the end of the text: the object is complete
        yield from literal(reader, _FENCE)
        following = yield from skip_space(reader)
    if is_fenced and following == "`":  # another block may follow, but no word in backticks
        start = reader.at
        yield from literal(reader, _FENCE)
        reader.at = start
    elif following not in ("", "{", "<"):  # text about an object: the object is not a call
        raise Malformed
    if following == "<":
        yield from find(reader, ("</tool_call>",))  # some leave out the opening mark alone
    yield from calls


FORMAT = ToolFormat(
    _read,
    openings=("<tool_call>",),
    bare="{`",
    marks=("<tool_call>", "</tool_call>"),
    signs=("<tool_call>",),
    strangers=("<arg_key>", "<parameter=", "<invoke name="),
    rank=1,
    frame=("<tool_call>\n", "\n</tool_call>"),
    aliases=("qwen", "qwen25"),
)
