"""Writes what was generated as OpenAI's completion: streamed in chunks or whole."""

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType

from octavo import fresh
from octavo.messages import Logprobs
from octavo.server.dialects.openai_completions.output import Choice, Completion
from octavo.server.dialects.openai_completions.request import CompletionRequest
from octavo.server.generate.generation import Generation, Piece, Usage
from octavo.server.generate.logprobs import (
    PromptLogprob,
    TextOffsets,
    completion_logprobs,
    count_logprobs,
    prompt_logprobs,
)
from octavo.server.generate.offload import offload
from octavo.server.generate.requests import Prompt, build_requests
from octavo.server.generate.structured import FREE, AnswerCheck, AnswerForm
from octavo.server.http.sse import DONE, Frames, event
from octavo.server.state.service import Service

DEFAULT_MAX_TOKENS = 16


class CompletionWriter:
    """The choices of one completion. Choice p × n + i is the i-th of prompt p."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        response_id: str,
        prompts: list[Prompt],
        arrived: float,
        form: AnswerForm = FREE,
    ) -> None:
        text = service.text
        # An echo of the prompt alone: one token must be computed all the same, and is not returned.
        self._is_echo_only = bool(fields.echo) and fields.max_tokens == 0
        if self._is_echo_only:
            fields = fields.model_copy(update={"max_tokens": 1})
        of_prompt = fields.prompt_logprobs
        if fields.echo and fields.logprobs is not None:
            of_prompt = max(fields.logprobs, of_prompt or 0)
        requests = build_requests(
            response_id,
            prompts,
            fields,
            report=service.report,
            budget=service.config.budget,
            text=text,
            logprobs=fields.logprobs,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            arrived=arrived,
            prompt_logprobs=of_prompt,
            grammar=form.grammar,
        )
        wants_tokens = fields.logprobs is not None or bool(fields.return_token_ids)
        self._is_text_only = not (wants_tokens or fields.echo)
        self._scores_prompt = of_prompt is not None
        per_event = fields.tokens_per_event(service.config)
        self.generation = Generation(service, requests, per_event, wants_tokens, num_kept=fields.num_kept)
        self._fields, self._text, self._prompts = fields, text, prompts
        self._check = form.check
        self._said: dict[int, str] = {}  # choice → its text so far, where it is to be checked
        self._offsets: dict[int, TextOffsets] = {}  # of the choices that have begun
        self._head = (response_id, int(fresh.now()), service.answering_name, service.fingerprint)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        generation, fields = self.generation, self._fields
        every = fields.wants_usage_in_every_chunk
        quiet: UnsetType | None = None if fields.wants_usage else UNSET
        frames = Frames(lambda index, text: Completion(*self._head, [Choice(index, text)], quiet))
        async with aclosing(generation.pieces()) as steps:
            async for pieces in steps:
                if self._check is not None:
                    pieces = [await self._checked(self._check, piece) for piece in pieces]
                num_scored = self._num_scored(pieces)
                if every or num_scored:
                    usage = self._usage() if every else quiet
                    yield await offload(num_scored, functools.partial(self._events, pieces, usage))
                else:
                    yield b"".join(
                        [
                            frames.event(piece.index, piece.delta.text)
                            if self._is_text_only and piece.delta.finish_reason is None and piece.progress is None
                            else self._event(piece, quiet)
                            for piece in pieces
                        ]
                    )
        last = event(Completion(*self._head, [], self._usage())) if fields.wants_usage else b""
        yield last + DONE

    async def collect(self) -> Completion:
        kept = await self.generation.whole()
        pieces = [choice.as_piece() for choice in kept]
        if self._check is not None:
            pieces = [await self._checked(self._check, piece) for piece in pieces]
        size = self._num_scored(pieces) + sum(count_logprobs(piece.logprobs) for piece in pieces)
        choices = await offload(size, lambda: [self._choice(piece) for piece in pieces])
        return Completion(*self._head, choices, self._usage())

    async def _checked(self, check: AnswerCheck, piece: Piece) -> Piece:
        """The piece; if it is a choice's last, with the verdict on its text."""
        text = self._said[piece.index] = self._said.get(piece.index, "") + piece.delta.text
        if piece.delta.finish_reason is None:
            return piece
        return msgspec.structs.replace(piece, schema_valid=await check.verdict(text))

    def _events(self, pieces: list[Piece], usage: Usage | UnsetType | None) -> bytes:
        return b"".join([self._event(piece, usage) for piece in pieces])

    def _num_scored(self, pieces: list[Piece]) -> int:
        """Prompt tokens and logprobs of these that the pieces carry: the first piece of each choice does."""
        if not (self._scores_prompt or self._fields.echo):
            return 0
        n, offsets, scores = self._fields.n or 1, self._offsets, self.generation.prompt_logprobs
        firsts = [piece.index // n for piece in pieces if piece.index not in offsets]
        return sum(len(self._prompts[number].ids) + count_logprobs(scores[number]) for number in firsts)

    def _event(self, piece: Piece, usage: Usage | UnsetType | None) -> bytes:
        # Progress comes with an empty choice: clients look into the first choice of every chunk.
        choice = self._choice(piece) if piece.progress is None else Choice(piece.index, "")
        return event(Completion(*self._head, [choice], usage, piece.progress or UNSET))

    def _usage(self) -> Usage:
        usage = self.generation.usage()
        if not self._is_echo_only:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _prompt_scores(self, scores: Sequence[Logprobs]) -> list[dict[str, PromptLogprob] | None] | UnsetType | None:
        count = self._fields.prompt_logprobs
        if count is None:
            return UNSET if self._fields.stream else None
        return prompt_logprobs(self._text, [entry.cut_to(count) for entry in scores])

    def _choice(self, piece: Piece) -> Choice:
        """The next chunk of a choice, or the whole one: both begin with the echoed prompt."""
        fields, delta = self._fields, piece.delta
        text, token_ids = delta.text, piece.token_ids
        entries: Sequence[Logprobs | None] = piece.logprobs
        if self._is_echo_only:
            text, token_ids, entries = "", (), ()
        number = piece.index // (fields.n or 1)
        prompt, scores = self._prompts[number], self.generation.prompt_logprobs[number]
        is_first = piece.index not in self._offsets
        if is_first:
            self._offsets[piece.index] = TextOffsets(self._text, fields.skip_special_tokens is not False)
        echoed, words = (prompt.ids if is_first and fields.echo else []), ""
        if echoed:
            # Token ids are echoed with their control tokens: they are part of what was given.
            words = prompt.text if prompt.text is not None else self._text.decode(prompt.ids, skip_special_tokens=False)
            entries = [None, *(entry.cut_to(fields.logprobs or 0) for entry in scores), *entries]
        text, new_ids, token_ids = words + text, token_ids, [*echoed, *token_ids]
        logprobs = None
        if fields.logprobs is not None:
            offsets = self._offsets[piece.index]
            places = [*offsets.of_prompt(echoed, words), *offsets.of_output(new_ids)]
            as_ids = bool(fields.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self._text, token_ids, entries, places, as_ids)
        shows_prompt = is_first and bool(fields.return_token_ids)
        return Choice(
            piece.index,
            text,
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            logprobs,
            token_ids if fields.return_token_ids else UNSET,
            prompt.ids if shows_prompt else UNSET,
            self._prompt_scores(scores),
            piece.schema_valid,
        )
