"""Anthropic's message, built from an answer's events; each step is also an event of the stream, in Anthropic's order.

A whole message is a streamed one whose events are not sent."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.text.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

# ── the message ─────────────────────────────────────────────────────────────────────────────────────


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str = ""  # Anthropic's proof of origin: neither given nor checked here


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw  # an object as the model wrote it, so that no number is rounded


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class CacheCreation(msgspec.Struct, frozen=True):
    """Tokens that were added to the prefix cache, by how long they are asked to stay."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    input_tokens: int  # neither found in the prefix cache nor added to it at the request's wish
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation | None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, frozen=True, tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


# ── events of its stream ────────────────────────────────────────────────────────────────────────────


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", gc=False):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", gc=False):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", gc=False):
    signature: str


class JsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", gc=False):
    partial_json: str


class End(msgspec.Struct, frozen=True, gc=False):
    stop_reason: StopReason
    stop_sequence: str | None
    schema_valid: bool | UnsetType | None = UNSET  # as in Message


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", gc=False):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: End
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class Blocks:
    """The content of one message."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []  # completed
        self._events: list[msgspec.Struct] = []
        self._open: Block | None = None
        self._texts: list[str] = []  # of the open block

    def feed(self, event: Event) -> None:
        match event:
            case Content(text):
                self._begin(TextBlock(""))
                self._add(text, TextDelta(text))
            case Reasoning(text):
                self._begin(ThinkingBlock(""))
                self._add(text, ThinkingDelta(text))
            case CallBegin():
                self._close()
                self._begin(ToolUseBlock(event.id, event.name, msgspec.Raw(b"{}")))
            case CallArguments(_, text):
                self._add(text, JsonDelta(text))
            case CallEnd():
                self._close()

    def finish(self) -> None:
        """End the message. An empty answer has no block."""
        self._close()

    def take_events(self) -> list[msgspec.Struct]:
        """The stream events since the last call."""
        events, self._events = self._events, []
        return events

    def _begin(self, block: Block) -> None:
        if type(self._open) is type(block):
            return
        self._close()
        self._open, self._texts = block, []
        self._events.append(BlockStart(len(self.blocks), block))

    def _add(self, text: str, delta: TextDelta | ThinkingDelta | JsonDelta) -> None:
        self._texts.append(text)
        self._events.append(BlockDelta(len(self.blocks), delta))

    def _close(self) -> None:
        text = "".join(self._texts)
        match self._open:
            case None:
                return
            case TextBlock():
                block: Block = TextBlock(text)
            case ThinkingBlock():
                block = ThinkingBlock(text)
                self._events.append(BlockDelta(len(self.blocks), SignatureDelta(block.signature)))
            case ToolUseBlock():
                block = msgspec.structs.replace(self._open, input=msgspec.Raw(text.encode() or b"{}"))
        self._events.append(BlockStop(len(self.blocks)))
        self.blocks.append(block)
        self._open = None
