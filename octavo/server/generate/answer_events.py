"""One choice's text read as events (content, reasoning, tool calls), in pieces as they come or whole.

A whole answer is made of the events of the streamed one, so the two cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from octavo.messages import Logprobs, SamplingParams
from octavo.server.generate.generation import Piece, PromptProgress
from octavo.text import Text
from octavo.text.parsers import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    CollectedEvents,
    Content,
    Event,
    Reasoning,
    Schemas,
    ThinkFormat,
    ToolFormat,
)
from octavo.text.parsers.thinking import ThinkParser

_NUM_LAST_IDS = 32
"""Last tokens of a prompt that are checked for an opened reasoning block."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How to read the answers to one request."""

    tool_format: ToolFormat | None = None  # None: no tools, or none may be called
    tools: Schemas = field(default_factory=dict)
    think_format: ThinkFormat | None = None
    is_parallel: bool = True  # False: only the first call is returned
    is_calls_alone: bool = False  # enforced by a grammar: the rest of a truncated call is not content
    include_reasoning: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parsers need to see."""
        return tuple(mark for format in (self.tool_format, self.think_format) if format for mark in format.marks)


class AnswerPiece(msgspec.Struct, frozen=True, gc=False):
    """New events of one choice. `events` may be empty where every token is wanted."""

    index: int
    events: list[Event]  # no two of the same kind of text in a row
    finish_reason: str | None  # set once, on the last piece of the choice; "tool_calls" where it ends with calls
    stop_reason: str | int | None
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    progress: PromptProgress | None = None  # of the prompt; the rest is empty then
    schema_valid: bool | UnsetType | None = (
        UNSET  # with the finish reason, where answers are checked; None: not decided
    )


@dataclass(slots=True)
class WholeAnswer(CollectedEvents):
    """All of one choice."""

    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    schema_valid: bool | UnsetType | None = UNSET

    def add(self, piece: AnswerPiece) -> None:
        self.collect(piece.events)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            self.schema_valid = piece.schema_valid


class AnswerReader:
    """Reads one choice."""

    def __init__(self, text: Text, prompt_ids: Sequence[int], shape: AnswerShape) -> None:
        self._shape = shape
        prompt = text.decode(prompt_ids[-_NUM_LAST_IDS:], skip_special_tokens=False) if shape.think_format else ""
        # None: all of the answer is content.
        self._parser = (
            AnswerParser(shape.tool_format, shape.tools, shape.think_format, prompt)
            if shape.tool_format or shape.think_format
            else None
        )
        self._count = _ReasoningCount(text, prompt_ids, shape.think_format, prompt) if shape.think_format else None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._count.num_tokens if self._count else 0

    def read(self, piece: Piece) -> AnswerPiece:
        delta, parser = piece.delta, self._parser
        reason: str | None = delta.finish_reason
        events: list[Event]
        if parser is None:
            events = [Content(delta.text)] if delta.text else []
        else:
            events = parser.feed(delta.text)
            if reason is not None:
                events += parser.finish()
                if reason == "stop" and parser.num_calls:
                    reason = "tool_calls"
        if self._count is not None:
            self._count.push(piece.token_ids)
        if events and (len(events) > 1 or not self._shape.include_reasoning or self._shape.is_calls_alone):
            events = self._tidy(events)
        return AnswerPiece(
            piece.index, events, reason, delta.stop_reason, piece.token_ids, piece.logprobs, piece.progress
        )

    def _tidy(self, events: list[Event]) -> list[Event]:
        """Drop what was not requested, and merge neighbours of one kind."""
        kept: list[Event] = []
        for event in events:
            match event, kept[-1] if kept else None:
                case Reasoning(), _ if not self._shape.include_reasoning:
                    pass
                case Content(), _ if self._shape.is_calls_alone:
                    pass
                case ((CallBegin() | CallArguments() | CallEnd()), _) if event.index and not self._shape.is_parallel:
                    pass
                case Content(text), Content(before):
                    kept[-1] = Content(before + text)
                case Reasoning(text), Reasoning(before):
                    kept[-1] = Reasoning(before + text)
                case _:
                    kept.append(event)
        return kept


class _ReasoningCount:
    """Counts the reasoning tokens of one choice, including the marks. It reads token by token, so that the count does not depend
    on how many arrive at once."""

    def __init__(self, text: Text, prompt_ids: Sequence[int], format: ThinkFormat, prompt: str) -> None:
        self._stream = text.stream(SamplingParams(), prompt_ids, format.marks)
        self._parser = ThinkParser(format, prompt)
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._parser.has_reasoned else 0

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._parser.is_past:
                return
            self._num_read += 1
            self._parser.feed(self._stream.push([token_id]).text)
