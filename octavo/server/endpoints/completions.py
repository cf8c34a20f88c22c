"""POST /v1/completions: schema, parse, stream, collect.
Knows nothing of the engine beyond Generation."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from octavo.errors import Field, InvalidRequest
from octavo.messages import Logprobs
from octavo.server.generate.generation import Generation, Piece, PromptProgress, Usage
from octavo.server.generate.logprobs import (
    CompletionLogprobs,
    PromptLogprob,
    completion_logprobs,
    num_told,
    prompt_logprobs,
)
from octavo.server.generate.offload import offload
from octavo.server.generate.requests import LONG_TEXT, Prompt, build_requests, cut_prompt, new_id
from octavo.server.generate.structured import read_grammar
from octavo.server.http.respond import respond
from octavo.server.http.sse import DONE, Frames, event
from octavo.server.schema.fields import Dialect, GenerationFields, read_fields
from octavo.server.schema.shapes import EVENTS, Prompts, Shape
from octavo.server.schema.unsupported import NOT_OFFERED as NOT_OFFERED_ANYWHERE
from octavo.server.state.service import Service

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "suffix": ("",),
}


class CompletionRequest(GenerationFields):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None  # even 0 asks for the chosen token's


DIALECT = Dialect("completions", "/v1/completions", CompletionRequest, {**NOT_OFFERED_ANYWHERE, **NOT_OFFERED})


class Choice(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: CompletionLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Whole answers and the chunks of a stream have one shape."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


SHAPES = {f"POST {DIALECT.path}": Shape(Completion, EVENTS)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, DIALECT, service.config.server)
        service.check_model(fields.model)
        grammar = await read_grammar(service, fields, fields.response_format)
        response_id = new_id("cmpl")
        response = _Response(service, fields, response_id, await parse(service, fields), arrived, grammar)
        return await respond(service, request, fields, response_id, response)

    return router


async def parse(service: Service, fields: CompletionRequest) -> list[Prompt]:
    given = fields.prompt
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        prompts = {"prompt": given}
    elif not isinstance(given, list):
        raise _wrong_prompt("prompt")
    elif not given:
        raise InvalidRequest("prompt is empty: at least one token is needed", param="prompt")
    elif len(given) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt has {len(given)} entries; at most {MAX_PROMPTS} are taken at once", param="prompt"
        )
    else:
        prompts = {f"prompt[{at}]": item for at, item in enumerate(given)}
    for param, item in prompts.items():
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise _wrong_prompt(param)

    def encode() -> list[Prompt]:
        words, report = service.text.encode, service.report
        limit = report.max_model_len if fields.truncate_prompt_tokens is None else None
        found = []
        for param, item in prompts.items():
            ids = words(item, param=param, max_tokens=limit) if isinstance(item, str) else item
            kept = cut_prompt(ids, fields, report)
            found.append(Prompt(kept, Field(param), item if isinstance(item, str) and len(kept) == len(ids) else None))
        return found

    # Many prompts hold up the other streams as one long one does: what counts is all of their text.
    size = sum(len(item) for item in prompts.values() if isinstance(item, str))
    return await asyncio.to_thread(encode) if size > LONG_TEXT else encode()


def _wrong_prompt(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: a prompt is a string or a list of token ids; several prompts are a list of either", param=param
    )


class _Response:
    """One answer, streamed or whole. Choice p × n + i is the i-th of prompt p."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        response_id: str,
        prompts: list[Prompt],
        arrived: float,
        grammar: str = "",
    ) -> None:
        text = service.text
        # An echo of the prompt alone: a token must be computed all the same, and nobody sees it.
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
            text=text,
            logprobs=fields.logprobs,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            arrived=arrived,
            prompt_logprobs=of_prompt,
            grammar=grammar,
        )
        wants_tokens = fields.logprobs is not None or bool(fields.return_token_ids)
        self._is_plain = not (wants_tokens or fields.echo)
        self._tells_prompt = of_prompt is not None
        per_event = fields.tokens_per_event(service.config.server)
        self.request_ids = [each.id for each in requests]
        self._generation = Generation(service, requests, per_event, wants_tokens, num_kept=fields.num_kept)
        self._fields, self._text, self._prompts = fields, text, prompts
        self._offsets: dict[int, int] = {}  # of each choice that has begun: characters of its tokens so far
        self._head = (response_id, int(time.time()), service.model_name, service.fingerprint)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        generation, fields = self._generation, self._fields
        every = fields.wants_usage_in_every_chunk
        quiet: UnsetType | None = None if fields.wants_usage else UNSET
        frames = Frames(lambda index, text: Completion(*self._head, [Choice(index, text)], quiet))
        async with aclosing(generation.pieces()) as steps:
            async for pieces in steps:
                num_scored = self._num_scored(pieces)
                if every or num_scored:
                    usage = self._usage() if every else quiet
                    yield await offload(num_scored, functools.partial(self._events, pieces, usage))
                else:
                    yield b"".join(
                        [
                            frames.event(piece.index, piece.delta.text)
                            if self._is_plain and piece.delta.finish_reason is None and piece.progress is None
                            else self._event(piece, quiet)
                            for piece in pieces
                        ]
                    )
        last = event(Completion(*self._head, [], self._usage())) if fields.wants_usage else b""
        yield last + DONE

    async def collect(self) -> Completion:
        wholes = await self._generation.whole()
        pieces = [whole.as_piece() for whole in wholes]
        size = self._num_scored(pieces) + sum(num_told(piece.logprobs) for piece in pieces)
        choices = await offload(size, lambda: [self._choice(piece) for piece in pieces])
        return Completion(*self._head, choices, self._usage())

    def _events(self, pieces: list[Piece], usage: Usage | UnsetType | None) -> bytes:
        return b"".join([self._event(piece, usage) for piece in pieces])

    def _num_scored(self, pieces: list[Piece]) -> int:
        """What these tell of prompts' tokens: the first of each choice does."""
        if not self._tells_prompt:
            return 0
        n, offsets, scores = self._fields.n or 1, self._offsets, self._generation.prompt_logprobs
        return sum(num_told(scores[piece.index // n]) for piece in pieces if piece.index not in offsets)

    def _event(self, piece: Piece, usage: Usage | UnsetType | None) -> bytes:
        # A choice without text, beside progress: clients that look into every chunk's first choice find one.
        choice = self._choice(piece) if piece.progress is None else Choice(piece.index, "")
        return event(Completion(*self._head, [choice], usage, piece.progress or UNSET))

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        if not self._is_echo_only:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _prompt_scores(self, scores: Sequence[Logprobs]) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        count = self._fields.prompt_logprobs
        return UNSET if count is None else prompt_logprobs(self._text, [entry.cut_to(count) for entry in scores])

    def _choice(self, piece: Piece) -> Choice:
        """The next of a stream, or the whole: both begin with what is said of the prompt."""
        fields, delta = self._fields, piece.delta
        text, token_ids = delta.text, piece.token_ids
        entries: Sequence[Logprobs | None] = piece.logprobs
        if self._is_echo_only:
            text, token_ids, entries = "", (), ()
        number = piece.index // (fields.n or 1)
        prompt, scores = self._prompts[number], self._generation.prompt_logprobs[number]
        is_first = piece.index not in self._offsets
        if is_first and fields.echo:
            words = prompt.text if prompt.text is not None else self._text.decode(prompt.ids)
            text, token_ids = words + text, [*prompt.ids, *token_ids]
            entries = [None, *scores, *entries]
        offset = self._offsets.setdefault(piece.index, 0)
        logprobs = None
        if fields.logprobs is not None:
            cut = [entry and entry.cut_to(fields.logprobs) for entry in entries]
            logprobs = completion_logprobs(self._text, token_ids, cut, offset)
            self._offsets[piece.index] = offset + sum(map(len, logprobs.tokens))
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
        )
