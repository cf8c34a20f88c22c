"""AnswerParser: splits one output into reasoning, then content and tool calls. Either format may be missing; such text is then
passed through as content. CollectedEvents assembles a complete answer from the events."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.text.parsers.calls import CallParser, Schemas, ToolFormat
from octavo.text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from octavo.text.parsers.thinking import ThinkFormat, ThinkParser


class AnswerParser:
    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tools: Schemas | None = None,
        think_format: ThinkFormat | None = None,
        prompt: str = "",
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`tool_format` None: the request has no tools, or may not call them. `prompt`: the prompt's text, or its end: a template
        may have opened the reasoning there. `new_id`: makes ids for calls; None: the format's own."""
        self.marks = (*(tool_format.marks if tool_format else ()), *(think_format.marks if think_format else ()))
        """Texts that must reach this parser even if they are special tokens, which detokenizers skip."""
        self._calls = CallParser(tool_format, tools or {}, new_id) if tool_format else None
        self._thinking = ThinkParser(think_format, prompt) if think_format else None

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    def feed(self, text: str) -> list[Event]:
        """Add text and return all events that are now certain. Nothing may be fed after finish()."""
        events: list[Event] = self._thinking.feed(text) if self._thinking else [Content(text)] if text else []
        return events if self._calls is None else _to_calls(self._calls, events)

    def finish(self) -> list[Event]:
        """Return the last events at the end of the output: held-back text becomes content, reasoning or a complete call."""
        events: list[Event] = self._thinking.finish() if self._thinking else []
        return events if self._calls is None else _to_calls(self._calls, events) + self._calls.finish()


def _to_calls(calls: CallParser, events: list[Event]) -> list[Event]:
    """The events with the calls in their content."""
    given: list[Event] = []
    for event in events:
        given += calls.feed(event.text) if isinstance(event, Content) else [event]
    return given


class WholeCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # the text of a JSON object


@dataclass(slots=True)
class CollectedEvents:
    """The events of one answer put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def collect(self, events: Iterable[Event]) -> None:
        """Add the next events of the answer."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, call_id, name):
                    self.calls.append(WholeCall(call_id, name, ""))
                case CallArguments(index, text):
                    call = self.calls[index]
                    self.calls[index] = msgspec.structs.replace(call, arguments=call.arguments + text)
                case CallEnd():
                    pass
