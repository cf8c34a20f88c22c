"""[{"name": …, "arguments": {…}}, …] as the whole output: what a grammar makes any model write, whatever its template. The name
must be a tool of the request: without a mark, only the name distinguishes a call from other JSON."""

from octavo.text.parsers.calls import Schemas, ToolFormat
from octavo.text.parsers.json_text import call_of, load, object_text
from octavo.text.parsers.reader import Malformed, Reader, Steps, literal, skip_space


def _read(reader: Reader, opening: str, tools: Schemas) -> Steps[None]:
    yield from literal(reader, "[")
    while True:
        yield from skip_space(reader)
        call = call_of(load((yield from object_text(reader))), must_say_arguments=True)
        if call.name not in tools:
            raise Malformed
        mark = ""
        if (yield from skip_space(reader)):
            mark = yield from literal(reader, ",", "]")
        yield call
        if mark != ",":
            return


FORMAT = ToolFormat(_read, bare="[")
