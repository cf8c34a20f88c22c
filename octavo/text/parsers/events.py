"""Events of a parsed output: content, reasoning and tool calls."""

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    index: int  # number of the call in this output, from 0
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str  # the texts of one call concatenate to a JSON object


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
