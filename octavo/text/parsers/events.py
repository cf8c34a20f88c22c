"""What an answer consists of, as it comes: content, reasoning and tool calls.
Knows nothing of any format, and of no endpoint's own names for these things."""

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    index: int  # of the calls of this answer, from 0
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str  # all of one call, put together, are the text of a JSON object


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
