"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and 3, and many others. Nothing is repaired: an object
that is not JSON, or more than one between the marks, is content."""

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import call_of, load, object_text
from octavo.text.parsers.reader import Reader, Steps, literal, skip_space


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    yield from skip_space(reader)
    call = call_of(load((yield from object_text(reader))))
    if (
        yield from skip_space(reader)
    ):  # the closing mark may be missing at the end of the text: the object is complete
        yield from literal(reader, "</tool_call>")
    yield call


FORMAT = ToolFormat(
    _read,
    openings=("<tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
    signs=("<tool_call>",),
    strangers=("<arg_key>", "<parameter=", "<invoke name="),
    rank=1,
    frame=("<tool_call>\n", "\n</tool_call>"),
    aliases=("qwen", "qwen25"),
)
