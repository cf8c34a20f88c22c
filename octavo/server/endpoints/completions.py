"""POST /v1/completions: schema, parse, stream, collect.
Knows nothing of the engine beyond Generation."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from octavo.errors import InvalidRequest
from octavo.server.answers import json_answer
from octavo.server.fields import NOT_OFFERED as NOT_OFFERED_ANYWHERE
from octavo.server.fields import Dialect, GenerationFields, read_fields
from octavo.server.generation import Generation, Piece, Usage
from octavo.server.requests import LONG_TEXT, Prompt, build_requests, new_id
from octavo.server.service import Service
from octavo.server.sse import DONE, EventStream, Frames, event, until_gone

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),  # a number here: even 0 asks for the chosen token's
    "suffix": ("",),
}


class CompletionRequest(GenerationFields):
    prompt: Any  # string, list of strings, list of token ids, list of lists of token ids


DIALECT = Dialect("completions", "/v1/completions", CompletionRequest, {**NOT_OFFERED_ANYWHERE, **NOT_OFFERED})


class Choice(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Whole answers and the chunks of a stream have one shape."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, DIALECT, service.config.server)
        service.check_model(fields.model)
        response = _Response(service, fields, new_id("cmpl"), await parse(service, fields), arrived)
        if fields.stream:
            return EventStream(service, response.stream(), fields.ignored)
        body = await until_gone(service, request.receive, response.collect())
        return json_answer(body, fields.ignored)

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
        words, limit = service.text.encode, service.report.max_model_len
        return [
            Prompt(words(item, param=param, max_tokens=limit) if isinstance(item, str) else item, param)
            for param, item in prompts.items()
        ]

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
        self, service: Service, fields: CompletionRequest, response_id: str, prompts: list[Prompt], arrived: float
    ) -> None:
        text = service.text
        requests = build_requests(
            response_id,
            prompts,
            fields,
            report=service.report,
            eos_ids=text.eos_ids,
            default_sampling=text.default_sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            arrived=arrived,
        )
        self._generation = Generation(service, requests, fields.tokens_per_event(service.config.server))
        self._fields = fields
        self._head = (response_id, int(time.time()), service.model_name, service.fingerprint)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        generation, fields = self._generation, self._fields
        every = fields.wants_usage_in_every_chunk
        quiet: UnsetType | None = None if fields.wants_usage else UNSET
        frames = Frames(lambda index, text: Completion(*self._head, [Choice(index, text)], quiet))
        async with aclosing(generation.pieces()) as steps:
            async for pieces in steps:
                if every:
                    usage = generation.usage()
                    yield b"".join([event(Completion(*self._head, [_choice(piece)], usage)) for piece in pieces])
                else:
                    yield b"".join(
                        [
                            frames.event(piece.index, piece.delta.text)
                            if piece.delta.finish_reason is None
                            else event(Completion(*self._head, [_choice(piece)], quiet))
                            for piece in pieces
                        ]
                    )
        last = event(Completion(*self._head, [], generation.usage())) if fields.wants_usage else b""
        yield last + DONE

    async def collect(self) -> Completion:
        wholes = await self._generation.whole()
        choices = [Choice(whole.index, whole.text, whole.finish_reason, whole.stop_reason) for whole in wholes]
        return Completion(*self._head, choices, self._generation.usage())


def _choice(piece: Piece) -> Choice:
    if piece.delta.finish_reason is None:
        return Choice(piece.index, piece.delta.text)
    return Choice(piece.index, piece.delta.text, piece.delta.finish_reason, piece.delta.stop_reason)
