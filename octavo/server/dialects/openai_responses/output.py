"""One response's output items, built from an answer's events; each step is also an event of the stream, in OpenAI's order.

A whole response is a streamed one whose events are not sent."""

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.server.dialects.openai_responses import types
from octavo.server.generate.logprobs import TokenLogprob
from octavo.server.generate.requests import new_id
from octavo.text.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning


class Output:
    def __init__(self, first_sequence_number: int = 0) -> None:
        self.items: list[types.Item] = []  # completed
        self._next_number = first_sequence_number
        self._events: list[types.StreamEvent] = []
        self._open: types.Item | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []

    def feed(self, event: Event, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add an event. `logprobs`: of the tokens behind the event's text."""
        match event:
            case Content(text):
                self._say(text, logprobs)
            case Reasoning(text):
                self._think(text)
            case CallBegin():
                self._close()
                self._begin(types.CallItem(item_id("fc"), event.id, event.name, "", "in_progress"))
            case CallArguments(_, text):
                self._texts.append(text)
                self._add_event(types.ArgumentsDelta, *self._place, text)
            case CallEnd():
                self._close()

    def finish(self, is_cut: bool) -> None:
        """End the answer. `is_cut`: a limit ended it, not the model. An empty answer is an empty message."""
        if self._open is None and not self.items:
            self._say("", ())
        self._close("incomplete" if is_cut else "completed")

    def take_events(self) -> list[types.StreamEvent]:
        """The stream events since the last call."""
        events, self._events = self._events, []
        return events

    def next_number(self) -> int:
        """The sequence number for an event that is made elsewhere."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    @property
    def items_so_far(self) -> list[types.Item]:
        """The completed items and what there is of the open one."""
        return [*self.items, self._item("incomplete")] if self._open is not None else self.items

    @property
    def _place(self) -> tuple[str, int]:
        assert self._open is not None
        return self._open.id, len(self.items)

    def _add_event(self, kind: type[types.StreamEvent], *values: Any) -> None:
        self._events.append(kind(self.next_number(), *values))

    def _begin(self, item: types.Item) -> None:
        self._open, self._texts, self._logprobs = item, [], []
        self._add_event(types.ItemAdded, len(self.items), item)

    def _say(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        if not isinstance(self._open, types.MessageItem):
            self._close()
            self._begin(types.MessageItem(item_id("msg"), "assistant", [], "in_progress"))
            self._add_event(types.PartAdded, *self._place, 0, types.OutputText(""))
        if text:
            self._texts.append(text)
            self._logprobs += logprobs
            self._add_event(types.OutputTextDelta, *self._place, 0, text, list(logprobs))

    def _think(self, text: str) -> None:
        if not isinstance(self._open, types.ReasoningItem):
            self._close()
            self._begin(types.ReasoningItem(item_id("rs"), [], status="in_progress"))
            self._add_event(types.PartAdded, *self._place, 0, types.ReasoningText(""))
        self._texts.append(text)
        self._add_event(types.ReasoningDelta, *self._place, 0, text)

    def _close(self, status: types.Status = "completed") -> None:
        if self._open is None:
            return
        text = "".join(self._texts)
        item = self._item(status)
        match item:
            case types.MessageItem(content=[types.OutputText() as part]):
                self._add_event(types.OutputTextDone, *self._place, 0, text, self._logprobs)
                self._add_event(types.PartDone, *self._place, 0, part)
            case types.ReasoningItem(content=[part]):
                self._add_event(types.ReasoningDone, *self._place, 0, text)
                self._add_event(types.PartDone, *self._place, 0, part)
            case types.CallItem():
                self._add_event(types.ArgumentsDone, *self._place, item.name, text)
        self._add_event(types.ItemDone, len(self.items), item)
        self.items.append(item)
        self._open = None

    def _item(self, status: types.Status) -> types.Item:
        text = "".join(self._texts)
        replace = msgspec.structs.replace
        match self._open:
            case types.MessageItem():
                return replace(self._open, content=[types.OutputText(text, [], self._logprobs)], status=status)
            case types.ReasoningItem():
                return replace(self._open, content=[types.ReasoningText(text)], status=status)
            case types.CallItem():
                return replace(self._open, arguments=text, status=status)
            case _:
                raise AssertionError("unexpected item type")


def item_id(prefix: str) -> str:
    """A new id as OpenAI writes them: msg_…, fc_…, rs_…"""
    return new_id(prefix).replace("-", "_", 1)
