"""{"name": …, "parameters": {…}} as the whole output, several separated by ";": Llama 3.1 to 3.3. The name must be a tool of the
request: without a mark, only the name distinguishes a call from other JSON."""

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import call_of, load, object_text
from octavo.text.parsers.reader import Malformed, Reader, Steps, find, skip_space


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    while True:
        yield from skip_space(reader)
        call = call_of(load((yield from object_text(reader))), must_say_arguments=True)
        if not opening and call.name not in tools:
            raise Malformed
        yield call
        end = reader.at
        yield from skip_space(reader)
        if not (yield from find(reader, (";",))):
            reader.at = end
            return


FORMAT = ToolFormat(
    _read,
    openings=("<|python_tag|>",),
    bare="{",
    marks=("<|python_tag|>",),
    signs=("<|start_header_id|>", '"parameters"'),
    aliases=("llama3", "llama4_json"),
)
