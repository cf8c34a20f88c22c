"""POST /v1/chat/completions."""

import time

from fastapi import APIRouter, Request, Response

from octavo.errors import Field
from octavo.server.dialects.openai_chat.output import ChatCompletion
from octavo.server.dialects.openai_chat.writer import ChatWriter
from octavo.server.generate.chat_request import ChatFields, parse
from octavo.server.generate.chat_task import ChatTask
from octavo.server.generate.messages import NONCE, are_nonces_dropped, drop_nonce
from octavo.server.generate.requests import new_id
from octavo.server.http.respond import submit_and_respond
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.schema.unsupported import NOT_OFFERED as NOT_OFFERED_ANYWHERE
from octavo.server.state.service import Service

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


ROUTE_SCHEMA = RouteSchema("chat", "/v1/chat/completions", ChatFields, {**NOT_OFFERED_ANYWHERE, **NOT_OFFERED})


SHAPES = {f"POST {ROUTE_SCHEMA.path}": Shape(ChatCompletion, EVENTS)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, service.config)
        await service.check_model(fields.model)
        if are_nonces_dropped(service.config.server) and drop_nonce(fields.messages):
            fields.pass_over(Field("messages", 0, "content", NONCE), service.config)
        prompt = await parse(service, fields)
        response_id = new_id("chatcmpl")
        task = await ChatTask.prepare(service, fields, prompt, response_id=response_id, arrived=arrived)
        writer = ChatWriter(service, fields, task)
        return await submit_and_respond(service, request, fields, response_id, task, writer, ignored=fields.ignored)

    return router
