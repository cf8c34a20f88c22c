"""POST /v1/chat/completions: schema, parse, stream, collect.
Knows nothing of the engine beyond Generation, and of templates only that the text room has one."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from octavo.errors import InvalidRequest, Unsupported
from octavo.messages import Logprobs
from octavo.server.answers import json_answer
from octavo.server.fields import NOT_OFFERED as NOT_OFFERED_ANYWHERE
from octavo.server.fields import Dialect, GenerationFields, read_fields
from octavo.server.generation import Generation, Piece, PromptProgress, Usage
from octavo.server.logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, prompt_logprobs
from octavo.server.requests import LONG_TEXT, Prompt, build_requests, cut_prompt, new_id
from octavo.server.service import Service
from octavo.server.sse import DONE, Frames, event, stream_answer, until_gone

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""developer is OpenAI's newer name of system; the templates of open models know only the older one."""

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says nothing where there are no tools
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_NOT_OFFERED = {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "annotations",
                       "reasoning", "reasoning_content"}  # fmt: skip
"""Keys of a message that clients send back as null or empty from an earlier answer."""


class ChatRequest(GenerationFields):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None


DIALECT = Dialect("chat", "/v1/chat/completions", ChatRequest, {**NOT_OFFERED_ANYWHERE, **NOT_OFFERED})


class Message(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, gc=False):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, gc=False):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, gc=False):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET  # null in every chunk but the last where usage was asked for
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, DIALECT, service.config.server)
        service.check_model(fields.model)
        response_id = new_id("chatcmpl")
        response = _Response(service, fields, response_id, await parse(service, fields), arrived)
        if fields.stream:
            return stream_answer(
                service,
                request,
                response_id,
                response.stream(),
                ignored=fields.ignored,
                resumable=fields.wants_resumable,
            )
        body = await until_gone(service, request.receive, response.collect())
        return json_answer(body, fields.ignored)

    return router


async def parse(service: Service, fields: ChatRequest) -> Prompt:
    messages = [parse_message(message, f"messages[{at}]") for at, message in enumerate(fields.messages)]
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    longest = service.report.max_model_len if fields.truncate_prompt_tokens is None else None
    encode = functools.partial(service.text.encode_chat, max_tokens=longest)
    size = sum(len(str(message["content"])) for message in messages)
    ids = await asyncio.to_thread(encode, messages) if size > LONG_TEXT else encode(messages)
    return Prompt(cut_prompt(ids, fields, service.report), "messages")


def num_logprobs(fields: ChatRequest) -> int | None:
    """None: none are wanted."""
    top = fields.top_logprobs
    if top and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if fields.logprobs else None


def parse_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as templates know it. The text room checks its content."""
    role = message.get("role")
    if role in ("tool", "function"):
        raise Unsupported(f"{where}.role {role!r} is not supported here yet: tools are not", param=f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    for key in message.keys() - {"role", "content", "name"}:
        if key not in MESSAGE_NOT_OFFERED or message[key] not in (None, [], ""):
            raise Unsupported(f"{where}.{key[:60]} is not supported here", param=f"{where}.{key[:60]}")
    kept = {"role": ROLES[role], "content": content}
    return kept if name is None else {**kept, "name": name}


class _Response:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, fields: ChatRequest, response_id: str, prompt: Prompt, arrived: float) -> None:
        text = service.text
        requests = build_requests(
            response_id,
            [prompt],
            fields,
            report=service.report,
            text=text,
            logprobs=num_logprobs(fields),
            default_max_tokens=None,
            arrived=arrived,
        )
        self._is_plain = not (fields.logprobs or fields.return_token_ids)
        per_event = fields.tokens_per_event(service.config.server)
        self._generation = Generation(service, requests, per_event, every_token=not self._is_plain)
        self._fields, self._text, self._prompt = fields, text, prompt
        self._head = (response_id, int(time.time()), service.model_name, service.fingerprint)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        generation, fields = self._generation, self._fields
        every = fields.wants_usage_in_every_chunk
        quiet: UnsetType | None = None if fields.wants_usage else UNSET
        before = b"".join(
            self._event(
                [ChunkChoice(index, Delta("assistant", ""))], generation.usage() if every else quiet, self._prompt_ids()
            )
            for index in range(generation.num_choices)
        )
        frames = Frames(lambda index, text: ChatChunk(*self._head, [ChunkChoice(index, Delta(content=text))], quiet))
        async with aclosing(generation.pieces()) as steps:
            async for pieces in steps:
                if every:
                    usage = generation.usage()
                    chunks = [self._piece_event(piece, usage) for piece in pieces]
                else:
                    chunks = [
                        frames.event(piece.index, piece.delta.text)
                        if self._is_plain and piece.delta.finish_reason is None and piece.progress is None
                        else self._piece_event(piece, quiet)
                        for piece in pieces
                    ]
                yield before + b"".join(chunks)
                before = b""
        yield (self._event([], generation.usage()) if fields.wants_usage else b"") + DONE

    async def collect(self) -> ChatCompletion:
        wholes = await self._generation.whole()
        choices = [
            Choice(
                whole.index,
                Message("assistant", whole.text),
                whole.finish_reason,
                whole.stop_reason,
                self._logprobs(whole.logprobs),
                self._token_ids(whole.token_ids),
            )
            for whole in wholes
        ]
        scores: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
        if self._fields.prompt_logprobs is not None:
            scores = prompt_logprobs(self._text, self._generation.prompt_logprobs[0])
        return ChatCompletion(*self._head, choices, self._generation.usage(), scores, self._prompt_ids())

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
        progress: PromptProgress | UnsetType = UNSET,
    ) -> bytes:
        return event(ChatChunk(*self._head, choices, usage, prompt_ids, progress))

    def _piece_event(self, piece: Piece, usage: Usage | UnsetType | None) -> bytes:
        # A choice without text, beside progress: clients that look into every chunk's first choice find one.
        return self._event([self._chunk_choice(piece)], usage, progress=piece.progress or UNSET)

    def _chunk_choice(self, piece: Piece) -> ChunkChoice:
        delta = Delta(content=piece.delta.text) if piece.delta.text else Delta()
        is_last = piece.delta.finish_reason is not None
        return ChunkChoice(
            piece.index,
            delta,
            piece.delta.finish_reason,
            piece.delta.stop_reason if is_last else UNSET,
            self._logprobs(piece.logprobs),
            self._token_ids(piece.token_ids),
        )

    def _logprobs(self, entries: Sequence[Logprobs]) -> ChatLogprobs | None:
        return chat_logprobs(self._text, entries) if self._fields.logprobs else None

    def _token_ids(self, token_ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return token_ids if self._fields.return_token_ids else UNSET

    def _prompt_ids(self) -> list[int] | UnsetType:
        return self._prompt.ids if self._fields.return_token_ids else UNSET
