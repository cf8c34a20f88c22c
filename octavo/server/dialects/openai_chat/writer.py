"""Writes the answers to a chat request as OpenAI's completion: streamed in chunks or whole."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from octavo import fresh
from octavo.messages import Logprobs
from octavo.server.dialects.openai_chat.output import (
    CallDelta,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Delta,
    Function,
    FunctionDelta,
    Message,
    ToolCall,
)
from octavo.server.generate.answer_events import AnswerPiece, WholeAnswer
from octavo.server.generate.chat_request import ChatFields
from octavo.server.generate.chat_task import ChatTask
from octavo.server.generate.generation import PromptProgress, Usage
from octavo.server.generate.logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, count_logprobs, prompt_logprobs
from octavo.server.generate.offload import offload
from octavo.server.http.sse import DONE, Frames, event
from octavo.server.state.service import Service
from octavo.text.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning


class ChatWriter:
    """The choices of one completion."""

    def __init__(self, service: Service, fields: ChatFields, task: ChatTask) -> None:
        self._fields, self._text, self._task = fields, service.text, task
        self._is_text_only = not (fields.logprobs or fields.return_token_ids)
        self._head = (task.response_id, int(fresh.now()), service.answering_name, service.fingerprint)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        task, fields = self._task, self._fields
        wants_usage = fields.wants_usage
        every = fields.wants_usage_in_every_chunk
        quiet: UnsetType | None = None if wants_usage else UNSET
        before = b"".join(
            self._event(ChunkChoice(index, Delta("assistant", "")), task.usage if every else quiet, self._prompt_ids())
            for index in range(task.num_choices)
        )
        frames = Frames(lambda index, text: ChatChunk(*self._head, [ChunkChoice(index, Delta(content=text))], quiet))
        async with aclosing(task.pieces()) as steps:
            async for pieces in steps:
                chunks = []
                for piece in pieces:
                    text = self._only_text(piece)
                    if text is not None and not every:
                        chunks.append(frames.event(piece.index, text))
                    else:
                        usage = task.usage if every else quiet
                        progress = piece.progress or UNSET
                        chunks += [self._event(choice, usage, UNSET, progress) for choice in self._chunk_choices(piece)]
                yield before + b"".join(chunks)
                before = b""
        if wants_usage:
            before += event(ChatChunk(*self._head, [], task.usage))
        yield before + DONE

    async def collect(self) -> ChatCompletion:
        answers = await self._task.whole()
        size = sum(count_logprobs(answer.logprobs) for answer in answers)
        choices = await offload(size, lambda: [self._choice(answer) for answer in answers])
        scores: list[dict[str, PromptLogprob] | None] | None = None
        if self._fields.prompt_logprobs is not None:
            entries = self._task.generation.prompt_logprobs[0]
            scores = await offload(count_logprobs(entries), lambda: prompt_logprobs(self._text, entries))
        return ChatCompletion(*self._head, choices, self._task.usage, scores, self._prompt_ids())

    def _choice(self, answer: WholeAnswer) -> Choice:
        return Choice(
            answer.index,
            _message(answer),
            answer.finish_reason,
            answer.stop_reason,
            self._logprobs(answer.logprobs),
            self._token_ids(answer.token_ids),
            answer.schema_valid,
        )

    def _event(
        self,
        choice: ChunkChoice,
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
        progress: PromptProgress | UnsetType = UNSET,
    ) -> bytes:
        return event(ChatChunk(*self._head, [choice], usage, prompt_ids, progress))

    def _only_text(self, piece: AnswerPiece) -> str | None:
        """The text of a piece that is content alone, as nearly all are. None: it holds more."""
        if self._is_text_only and piece.finish_reason is None and len(piece.events) == 1:
            match piece.events[0]:
                case Content(text):
                    return text
        return None

    def _chunk_choices(self, piece: AnswerPiece) -> list[ChunkChoice]:
        """One per event; the piece's tokens go with the first, its finish reason with the last. A piece without events gives an
        empty one: clients look into the first choice of every chunk."""
        made = _deltas(piece.events)
        is_last = piece.finish_reason is not None
        # Clients expect calls and the finish reason in different chunks.
        if not made or (is_last and made[-1].tool_calls):
            made.append(Delta())
        choices = [ChunkChoice(piece.index, delta) for delta in made]
        choices[0] = replace(
            choices[0], logprobs=self._logprobs(piece.logprobs), token_ids=self._token_ids(piece.token_ids)
        )
        if is_last:
            choices[-1] = replace(
                choices[-1],
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                schema_valid=piece.schema_valid,
            )
        return choices

    def _logprobs(self, entries: Sequence[Logprobs]) -> ChatLogprobs | None:
        as_ids = bool(self._fields.return_tokens_as_token_ids)
        return chat_logprobs(self._text, entries, as_ids) if self._fields.logprobs else None

    def _token_ids(self, token_ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return token_ids if self._fields.return_token_ids else UNSET

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._task.prompt.ids if self._fields.return_token_ids else UNSET


def _message(answer: WholeAnswer) -> Message:
    calls = [ToolCall(call.id, Function(call.name, call.arguments)) for call in answer.calls]
    is_elsewhere = bool(calls or answer.reasoning)
    return Message(
        "assistant",
        None if is_elsewhere and not answer.content else answer.content,
        tool_calls=calls or UNSET,
        reasoning_content=answer.reasoning or UNSET,
        reasoning=answer.reasoning or UNSET,
    )


def _deltas(events: Sequence[Event]) -> list[Delta]:
    """Events as deltas. The first delta of a call has its id and name, the following ones its arguments."""
    made: list[Delta] = []
    for one in events:
        match one:
            case Content(text):
                made.append(Delta(content=text))
            case Reasoning(text):
                made.append(Delta(reasoning_content=text, reasoning=text))
            case CallBegin(index, call_id, name):
                made.append(Delta(tool_calls=[CallDelta(index, call_id, "function", FunctionDelta(name, ""))]))
            case CallArguments(index, text):
                made.append(Delta(tool_calls=[CallDelta(index, function=FunctionDelta(arguments=text))]))
            case CallEnd():
                pass
    return made
