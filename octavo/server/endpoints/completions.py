"""POST /v1/completions."""

import time

from fastapi import APIRouter, Request, Response

from octavo.server.dialects.openai_completions.output import Completion
from octavo.server.dialects.openai_completions.request import NOT_OFFERED, CompletionRequest, parse
from octavo.server.dialects.openai_completions.writer import CompletionWriter
from octavo.server.generate.requests import new_id
from octavo.server.generate.structured import read_grammar
from octavo.server.http.respond import submit_and_respond
from octavo.server.schema.fields import Dialect, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.service import Service

DIALECT = Dialect("completions", "/v1/completions", CompletionRequest, NOT_OFFERED)


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
        writer = CompletionWriter(service, fields, response_id, await parse(service, fields), arrived, grammar)
        return await submit_and_respond(
            service, request, fields, response_id, writer.generation, writer, ignored=fields.ignored
        )

    return router
