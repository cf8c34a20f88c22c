"""POST /v1/embeddings. Nothing is streamed."""

import base64
import time
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.messages import GenerateRequest, numbers_of
from octavo.server.generate.embeddings import EmbeddingRequest, parse, vectors
from octavo.server.generate.offload import offload, one_of
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "request_id": (),
    "truncation_side": ("right",),
}


ROUTE_SCHEMA = RouteSchema("embeddings", "/v1/embeddings", EmbeddingRequest, NOT_OFFERED)


class Embedding(msgspec.Struct, frozen=True, gc=False):
    index: int
    embedding: list[float] | str  # str: base64 of float32, little endian
    object: Literal["embedding"] = "embedding"


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, gc=False):
    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


SHAPES = {f"POST {ROUTE_SCHEMA.path}": Shape(Embeddings)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, service.config)
        await service.check_model(fields.model)
        requests = await parse(service, fields, arrived)
        service.submit(requests)
        body = await while_connected(collect(service, requests, fields), service.track)
        return json_response(body, fields.ignored)

    return router


async def collect(service: Service, requests: list[GenerateRequest], fields: EmbeddingRequest) -> Embeddings:
    found = await vectors(service, requests)
    is_base64 = fields.encoding_format == "base64"
    size = sum(map(len, found)) // 4

    def shown(index: int, vector: bytes) -> Embedding:
        return one_of(size, Embedding(index, base64.b64encode(vector).decode() if is_base64 else numbers_of(vector)))

    data = await offload(size, lambda: [shown(index, vector) for index, vector in enumerate(found)])
    num_tokens = sum(len(request.prompt_ids) for request in requests)
    return Embeddings(data, service.answering_name, Usage(num_tokens, num_tokens))
