"""POST /api/embed and /api/embeddings, in Ollama's dialect."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.messages import GenerateRequest, numbers_of
from octavo.server.dialects.ollama.errors import ERROR_SCHEMA
from octavo.server.dialects.ollama.names import check_model
from octavo.server.dialects.ollama.output import Embeddings, OneEmbedding
from octavo.server.dialects.ollama.request import (
    EMBED_NAMES,
    EMBED_NOT_OFFERED,
    PROMPT_NAMES,
    EmbedRequest,
    OldEmbedRequest,
    embedding_fields,
    old_embedding_fields,
)
from octavo.server.generate.embeddings import parse, vectors
from octavo.server.generate.offload import offload, one_of
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

EMBED = RouteSchema("ollama embed", "/api/embed", EmbedRequest, EMBED_NOT_OFFERED)
EMBEDDINGS = RouteSchema("ollama embeddings", "/api/embeddings", OldEmbedRequest, EMBED_NOT_OFFERED)
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [EMBED, EMBEDDINGS]

SHAPES = {
    "POST /api/embed": Shape(Embeddings, error=ERROR_SCHEMA),
    "POST /api/embeddings": Shape(OneEmbedding, error=ERROR_SCHEMA),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    async def answer(requests: list[GenerateRequest]) -> list[list[float]]:
        service.submit(requests)
        found = await while_connected(vectors(service, requests), service.track)
        size = sum(map(len, found)) // 4
        return await offload(size, lambda: [one_of(size, numbers_of(vector)) for vector in found])

    @router.post("/api/embed")
    async def embed(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, EMBED, service.config)
        model = await check_model(service, fields.model)
        with EMBED_NAMES.in_errors():
            requests = await parse(service, embedding_fields(service, fields), arrived)
        numbers = await answer(requests)
        num_tokens = sum(len(one.prompt_ids) for one in requests)
        took = round((time.monotonic() - arrived) * 1e9)
        return json_response(Embeddings(model, numbers, took, 0, num_tokens), fields.ignored)

    @router.post("/api/embeddings")
    async def embeddings(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, EMBEDDINGS, service.config)
        await check_model(service, fields.model)
        with PROMPT_NAMES.in_errors():
            requests = await parse(service, old_embedding_fields(service, fields), arrived)
        (numbers,) = await answer(requests)
        return json_response(OneEmbedding(numbers), fields.ignored)

    return router
