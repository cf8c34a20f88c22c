"""Writes what was generated as llama.cpp's completions: streamed in events, or whole."""

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.messages import Logprobs
from octavo.server.dialects.llama_cpp.output import (
    LlamaChunk,
    LlamaCompletion,
    Progress,
    StopType,
    Timings,
    probabilities,
    settings,
)
from octavo.server.dialects.llama_cpp.request import Asked, LlamaOptions
from octavo.server.generate.generation import Generation, Piece
from octavo.server.generate.logprobs import count_logprobs
from octavo.server.generate.offload import offload
from octavo.server.generate.requests import build_requests
from octavo.server.generate.structured import AnswerCheck, AnswerForm
from octavo.server.http.sse import event
from octavo.server.state.service import Service
from octavo.text.stream import TextDelta


class LlamaWriter:
    """The choices of one request. Choice p × n + i is the i-th of prompt p."""

    def __init__(
        self, service: Service, given: LlamaOptions, asked: Asked, response_id: str, arrived: float, form: AnswerForm
    ) -> None:
        """`arrived`: time.monotonic() of the request."""
        self._requests = build_requests(
            response_id,
            asked.prompts,
            asked.fields,
            report=service.report,
            budget=service.config.budget,
            text=service.text,
            logprobs=given.n_probs or None,
            default_max_tokens=None,
            arrived=arrived,
            grammar=form.grammar,
        )
        self._given, self._asked, self._arrived = given, asked, arrived
        self._text, self._max_len = service.text, service.report.max_model_len
        self._model = given.model or service.answering_name
        wants_tokens = bool(given.n_probs or given.return_tokens or given.stream)
        per_event = asked.fields.tokens_per_event(service.config)
        self.generation = Generation(service, self._requests, per_event, wants_tokens)
        self._first: dict[int, float] = {}  # choice → time.monotonic() of its first piece
        self._num_tokens: dict[int, int] = {}  # choice → tokens so far
        self._lines: set[int] = set()  # choices with a line break
        self._tail: dict[int, tuple[str | None, str | int | None]] = {}  # choice → reasons of its end
        self._check = form.check
        self._said: dict[int, str] = {}  # choice → its text so far, where it is to be checked

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.generation.pieces()) as steps:
            async for pieces in steps:
                if self._check is not None:
                    pieces = [await self._checked(self._check, piece) for piece in pieces]
                size = sum(count_logprobs(piece.logprobs) for piece in pieces)
                if body := await offload(size, functools.partial(self._events, pieces)):
                    yield body

    async def collect(self) -> LlamaCompletion | Sequence[LlamaCompletion]:
        pieces = [choice.as_piece() for choice in await self.generation.whole(self._begin)]
        if self._check is not None:
            pieces = [await self._checked(self._check, piece) for piece in pieces]
        size = sum(count_logprobs(piece.logprobs) for piece in pieces)
        found = await offload(size, lambda: [self._whole(piece) for piece in pieces])
        return found if self._asked.is_list else found[0]

    async def _checked(self, check: AnswerCheck, piece: Piece) -> Piece:
        """The piece; if it is a choice's last, with the verdict on its text."""
        text = self._said[piece.index] = self._said.get(piece.index, "") + piece.delta.text
        if piece.delta.finish_reason is None:
            return piece
        return msgspec.structs.replace(piece, schema_valid=await check.verdict(text))

    def _events(self, pieces: list[Piece]) -> bytes:
        return b"".join(map(self._event, pieces))

    def _event(self, piece: Piece) -> bytes:
        """A piece's chunk, and what ends its choice."""
        if piece.progress is not None:
            done = piece.progress
            milliseconds = 1000 * (time.monotonic() - self._arrived)
            progress = Progress(done.prompt_tokens, done.cached_tokens, done.processed_tokens, milliseconds)
            return event(self._chunk(piece, prompt_progress=progress))
        self._note(piece)
        is_shown = not self._asked.is_empty and (piece.delta.text or piece.token_ids)
        body = event(self._chunk(piece)) if is_shown else b""
        if piece.delta.finish_reason is None:
            return body
        empty = Piece(piece.index, TextDelta("", None, None, piece.delta.num_tokens), schema_valid=piece.schema_valid)
        return body + event(self._end(empty))

    def _whole(self, piece: Piece) -> LlamaCompletion:
        self._note(piece)
        return self._end(piece)

    def _begin(self, piece: Piece) -> None:
        if piece.progress is None:
            self._first.setdefault(piece.index, time.monotonic())

    def _note(self, piece: Piece) -> None:
        index, delta = piece.index, piece.delta
        self._begin(piece)
        self._num_tokens[index] = delta.num_tokens
        if "\n" in delta.text:
            self._lines.add(index)
        if delta.finish_reason is not None:
            self._tail[index] = delta.finish_reason, delta.stop_reason

    def _chunk(self, piece: Piece, **more: Any) -> LlamaChunk:
        timings = self._timings(piece.index) if self._given.timings_per_token else UNSET
        return LlamaChunk(**self._members(piece), timings=timings, **more)

    def _members(self, piece: Piece) -> dict[str, Any]:
        number = self._number(piece.index)
        scores: Sequence[Logprobs] = () if self._asked.is_empty else piece.logprobs
        wants_ids = (self._given.return_tokens or self._given.stream) and not self._asked.is_empty
        return {
            "index": piece.index,
            "content": "" if self._asked.is_empty else piece.delta.text,
            "tokens": list(piece.token_ids) if wants_ids else [],
            "tokens_predicted": self._predicted(piece.index),
            "tokens_evaluated": len(self._requests[number].prompt_ids),
            "completion_probabilities": probabilities(self._text, scores) if scores else UNSET,
        }

    def _end(self, piece: Piece) -> LlamaCompletion:
        index = piece.index
        reason, stopped_by = self._tail[index]
        request = self._requests[self._number(index)]
        prompt = self._asked.prompts[self._number(index)]
        words = prompt.text if prompt.text is not None else self._text.decode(prompt.ids, skip_special_tokens=False)
        kind: StopType = "limit" if reason == "length" else "eos"
        if reason == "stop" and isinstance(stopped_by, str):
            kind = "word"
        length = len(request.prompt_ids) + self._num_tokens[index]
        return LlamaCompletion(
            **{**self._members(piece), "stop": True},
            timings=self._timings(index),
            model=self._model,
            prompt=words,
            generation_settings=settings(request.params, self._given.limit, self._given.grammar or ""),
            stop_type=kind,
            stopping_word=stopped_by if isinstance(stopped_by, str) and kind == "word" else "",
            has_new_line=index in self._lines,
            truncated=reason == "length" and length >= self._max_len,
            tokens_cached=self.generation.num_cached(self._number(index)),
            schema_valid=piece.schema_valid,
        )

    def _number(self, index: int) -> int:
        """The number of a choice's prompt."""
        return index // (self._asked.fields.n or 1)

    def _predicted(self, index: int) -> int:
        return 0 if self._asked.is_empty else self._num_tokens.get(index, 0)

    def _timings(self, index: int) -> Timings:
        now = time.monotonic()
        first = self._first.get(index, now)
        number = self._number(index)
        cached = self.generation.num_cached(number)
        num_prompt = len(self._requests[number].prompt_ids) - (cached or 0)
        num_predicted = self._predicted(index)
        before, after = 1000 * (first - self._arrived), 1000 * (now - first)
        return Timings(
            cached,
            num_prompt,
            before,
            before / max(1, num_prompt),
            1000 * num_prompt / max(before, 1e-3),
            num_predicted,
            after,
            after / max(1, num_predicted),
            1000 * num_predicted / max(after, 1e-3),
        )
