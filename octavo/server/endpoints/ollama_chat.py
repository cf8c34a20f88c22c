"""POST /api/chat and /api/generate, in Ollama's dialect."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server.dialects.ollama.errors import ERROR_SCHEMA, error_body, error_line
from octavo.server.dialects.ollama.names import check_model
from octavo.server.dialects.ollama.output import ChatChunk, GenerateChunk
from octavo.server.dialects.ollama.request import (
    CHAT_NAMES,
    CHAT_NOT_OFFERED,
    GENERATE_NAMES,
    GENERATE_NOT_OFFERED,
    OllamaChatRequest,
    OllamaGenerateRequest,
    parse_chat,
    parse_generate,
    parse_raw,
)
from octavo.server.dialects.ollama.writer import Make, OllamaWriter, chat_chunk, generate_chunk
from octavo.server.generate.chat_task import ChatTask
from octavo.server.generate.requests import new_id
from octavo.server.generate.text_task import TextTask
from octavo.server.http.errors import ERROR_SHAPES
from octavo.server.http.ndjson import LineStream, line
from octavo.server.http.respond import submit_and_respond
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import LINES, Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

CHAT = RouteSchema("ollama chat", "/api/chat", OllamaChatRequest, CHAT_NOT_OFFERED)
GENERATE = RouteSchema("ollama generate", "/api/generate", OllamaGenerateRequest, GENERATE_NOT_OFFERED)
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [CHAT, GENERATE]

SHAPES = {
    "POST /api/chat": Shape(ChatChunk, LINES, error=ERROR_SCHEMA),
    "POST /api/generate": Shape(GenerateChunk, LINES, error=ERROR_SCHEMA),
}
ERROR_SHAPES["/api"] = error_body  # of all of Ollama's routes


def router(service: Service) -> APIRouter:
    router = APIRouter()

    async def respond(
        request: Request,
        fields: OllamaChatRequest | OllamaGenerateRequest,
        task: ChatTask | TextTask,
        ignored: list[str],
        model: str,
        make: Make,
        arrived: float,
    ) -> Response:
        return await submit_and_respond(
            service,
            request,
            fields,
            task.response_id,
            task,
            OllamaWriter(task, model, make, arrived),
            ignored=ignored,
            error_event=error_line,
            keep_alive=line(make(model)),
            stream_class=LineStream,
        )

    @router.post("/api/chat")
    async def chat(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, CHAT, service.config)
        model = await check_model(service, fields.model)
        if not fields.messages:
            fields.check_load(service)
            return json_response(chat_chunk(model, done=True, done_reason="load"), fields.ignored)
        asked, prompt = await parse_chat(service, fields)
        with CHAT_NAMES.in_errors():
            task = await ChatTask.prepare(
                service,
                asked,
                prompt,
                response_id=new_id("ollama"),
                max_tokens=fields.chosen.max_tokens,
                arrived=arrived,
            )
        return await respond(request, fields, task, CHAT_NAMES.ignored(fields, asked), model, chat_chunk, arrived)

    @router.post("/api/generate")
    async def generate(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, GENERATE, service.config)
        model = await check_model(service, fields.model)
        if not fields.prompt and not fields.is_raw:
            fields.check_load(service)
            return json_response(generate_chunk(model, done=True, done_reason="load"), fields.ignored)
        task, ignored = await _generate_task(service, fields, arrived)
        return await respond(request, fields, task, ignored, model, generate_chunk, arrived)

    return router


async def _generate_task(
    service: Service, fields: OllamaGenerateRequest, arrived: float
) -> tuple[ChatTask | TextTask, list[str]]:
    """The task, and the names of fields without effect."""
    response_id, max_tokens = new_id("ollama"), fields.chosen.max_tokens
    if fields.is_raw:
        raw, text = await parse_raw(service, fields)
        with GENERATE_NAMES.in_errors():
            return await TextTask.prepare(
                service,
                raw,
                text,
                response_id=response_id,
                arrived=arrived,
                max_tokens=max_tokens,
                logprobs=fields.num_logprobs,
            ), [*fields.ignored]
    asked, prompt = await parse_generate(service, fields)
    with GENERATE_NAMES.in_errors():
        task = await ChatTask.prepare(
            service, asked, prompt, response_id=response_id, max_tokens=max_tokens, arrived=arrived
        )
    return task, GENERATE_NAMES.ignored(fields, asked)
