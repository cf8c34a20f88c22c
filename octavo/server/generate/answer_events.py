"""The answers to one chat request as events: content, reasoning and tool calls, in pieces as they come or whole.
Knows nothing of JSON or of any dialect: /v1/chat/completions, /v1/responses and /v1/messages all read answers here.

A whole answer is made of the events of the streamed one, so the two cannot differ.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from octavo.admission.searches import likeliest
from octavo.messages import GenerateRequest, Logprobs, SamplingParams
from octavo.server.generate.generation import CompletionTokensDetails, Generation, Piece, PromptProgress, Usage
from octavo.server.state.service import Service
from octavo.text import Text
from octavo.text.parsers import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    Schemas,
    ThinkFormat,
    ToolFormat,
    WholeCall,
)
from octavo.text.parsers.thinking import ThinkParser

_NUM_LAST_IDS = 32
"""Of a prompt: enough to see whether its template has opened the reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How to read the answers to one request."""

    tool_format: ToolFormat | None = None  # None: there are no tools, or none may be called
    tools: Schemas = field(default_factory=dict)
    think_format: ThinkFormat | None = None
    is_parallel: bool = True  # False: what comes after the first call is not given
    is_calls_alone: bool = False  # a grammar has it so: what is left of a call that was cut is no content
    include_reasoning: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that are part of the text to be read."""
        return tuple(mark for format in (self.tool_format, self.think_format) if format for mark in format.marks)


class AnswerPiece(msgspec.Struct, frozen=True, gc=False):
    """What one choice has to say next. Where several tokens are asked for one by one, `events` may be empty."""

    index: int
    events: list[Event]  # no two of the same kind of text in a row
    finish_reason: str | None  # set once, on the last piece of the choice; "tool_calls" where it ends with calls
    stop_reason: str | int | None
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    progress: PromptProgress | None = None  # of the prompt: then nothing else is new


@dataclass(slots=True)
class WholeAnswer:
    """All of one choice."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, piece: AnswerPiece) -> None:
        for event in piece.events:
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
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Answers:
    """The n answers to one request. `every_token`, `tokens_per_event`, `num_kept`: as for a Generation."""

    def __init__(
        self,
        service: Service,
        request: GenerateRequest,
        shape: AnswerShape,
        *,
        every_token: bool = False,
        tokens_per_event: int = 1,
        num_kept: int | None = None,
    ) -> None:
        self._shape = shape
        self._num_kept = num_kept
        self._every_token = every_token = every_token or num_kept is not None
        self.generation = Generation(
            service,
            [request],
            marks=shape.marks,
            every_token=every_token or shape.think_format is not None,  # those that think are counted
            tokens_per_event=tokens_per_event,
        )
        self._readers = [_Reader(service.text, request.prompt_ids, shape) for _ in range(request.params.n)]

    @property
    def num_choices(self) -> int:
        return len(self._readers)

    def usage(self) -> Usage:
        """What has been used so far."""
        usage = self.generation.usage()
        if self._shape.think_format is None:
            return usage
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(num_reasoning))

    async def pieces(self) -> AsyncGenerator[list[AnswerPiece], None]:
        """Lists of new pieces until every choice has finished. Leaving early aborts what still runs."""
        async with aclosing(self.generation.pieces()) as steps:
            async for pieces in steps:
                read = [self._readers[piece.index].read(piece) for piece in pieces]
                if not self._every_token:
                    read = [piece for piece in read if piece.events or piece.finish_reason or piece.progress]
                if read:
                    yield read

    async def whole(self) -> list[WholeAnswer]:
        """Every choice, once all have finished."""
        answers = [WholeAnswer(index) for index in range(self.num_choices)]
        async with aclosing(self.pieces()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    answers[piece.index].add(piece)
        return answers if self._num_kept is None else likeliest(answers, self._num_kept)


class _Reader:
    """Of one choice."""

    def __init__(self, text: Text, prompt_ids: Sequence[int], shape: AnswerShape) -> None:
        self._shape = shape
        prompt = text.decode(prompt_ids[-_NUM_LAST_IDS:], skip_special_tokens=False) if shape.think_format else ""
        self._parser = AnswerParser(shape.tool_format, shape.tools, shape.think_format, prompt)
        self._count = _ReasoningCount(text, prompt_ids, shape.think_format, prompt) if shape.think_format else None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._count.num_tokens if self._count else 0

    def read(self, piece: Piece) -> AnswerPiece:
        delta = piece.delta
        events = self._parser.feed(delta.text)
        reason: str | None = delta.finish_reason
        if self._count is not None:
            self._count.push(piece.token_ids)
        if reason is not None:
            events += self._parser.finish()
            if reason == "stop" and self._parser.num_calls:
                reason = "tool_calls"
        if events and (len(events) > 1 or not self._shape.include_reasoning or self._shape.is_calls_alone):
            events = self._tidy(events)
        return AnswerPiece(
            piece.index, events, reason, delta.stop_reason, piece.token_ids, piece.logprobs, piece.progress
        )

    def _tidy(self, events: list[Event]) -> list[Event]:
        """Without what was not asked for; of neighbours of one kind makes one."""
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
    """How many tokens of one choice are reasoning, its marks included. It reads token by token, so that the count does not
    depend on how many of them came at once."""

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
