"""POST /v1/completions."""

import functools
import time

from fastapi import APIRouter, Request, Response

from octavo.server.dialects.openai_completions.output import Completion
from octavo.server.dialects.openai_completions.request import NOT_OFFERED, CompletionRequest, parse
from octavo.server.dialects.openai_completions.writer import CompletionWriter
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import new_id
from octavo.server.generate.structured import read_form
from octavo.server.http.respond import submit_and_respond
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.service import Service

ROUTE_SCHEMA = RouteSchema("completions", "/v1/completions", CompletionRequest, NOT_OFFERED)

BYTES_PER_PROMPT = 100  # of a body: making a prompt's request takes as long

SHAPES = {f"POST {ROUTE_SCHEMA.path}": Shape(Completion, EVENTS)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, service.config)
        await service.check_model(fields.model)
        form = await read_form(service, fields, fields.response_format)
        response_id = new_id("cmpl")
        fields, prompts = await parse(service, fields)
        make = functools.partial(CompletionWriter, service, fields, response_id, prompts, arrived, form)
        writer = await offload_prompt(fields.num_bytes + BYTES_PER_PROMPT * len(prompts), make)
        return await submit_and_respond(
            service, request, fields, response_id, writer.generation, writer, ignored=fields.ignored
        )

    return router
