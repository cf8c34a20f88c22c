"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server.dialects.anthropic.errors import ERROR_SCHEMA, error_body, error_event
from octavo.server.dialects.anthropic.output import Message, Ping, TokenCount
from octavo.server.dialects.anthropic.request import NAMES, NOT_OFFERED, CountRequest, MessagesRequest, parse
from octavo.server.dialects.anthropic.writer import MessageWriter
from octavo.server.generate.chat_task import ChatTask
from octavo.server.generate.requests import new_id
from octavo.server.http.errors import ERROR_SHAPES
from octavo.server.http.respond import submit_and_respond
from octavo.server.http.sse import typed_event
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

ROUTE_SCHEMAS: list[RouteSchema[Any]] = [
    RouteSchema("messages", "/v1/messages", MessagesRequest, NOT_OFFERED),
    RouteSchema("messages count", "/v1/messages/count_tokens", CountRequest, NOT_OFFERED),
]


SHAPES = {
    "POST /v1/messages": Shape(Message, EVENTS, error=ERROR_SCHEMA),
    "POST /v1/messages/count_tokens": Shape(TokenCount, error=ERROR_SCHEMA),
}
ERROR_SHAPES["/v1/messages"] = error_body


def router(service: Service) -> APIRouter:
    router = APIRouter()
    config = service.config

    @router.post("/v1/messages")
    async def messages(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields: MessagesRequest = await read_fields(request, ROUTE_SCHEMAS[0], config)
        await service.check_model(fields.model)
        asked, prompt = await parse(service, fields)
        message_id = new_id("msg").replace("-", "_", 1)
        with NAMES.in_errors():
            task = await ChatTask.prepare(
                service, asked, prompt, response_id=message_id, max_tokens=fields.max_tokens, arrived=arrived
            )
        return await submit_and_respond(
            service,
            request,
            fields,
            message_id,
            task,
            MessageWriter(message_id, service.answering_name, task),
            ignored=NAMES.ignored(fields, asked),
            error_event=error_event,
            keep_alive=typed_event(Ping()),
            headers={"request-id": request.scope["octavo.request_id"]},
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        fields: CountRequest = await read_fields(request, ROUTE_SCHEMAS[1], config)
        await service.check_model(fields.model)
        asked, prompt = await parse(service, fields)
        return json_response(TokenCount(len(prompt.ids)), NAMES.ignored(fields, asked))

    return router
