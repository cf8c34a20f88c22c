"""POST /rerank, /v1/rerank and /v2/rerank, with vLLM's shapes, which are Jina's and Cohere's: documents in the order in which they answer a
query."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.admission.pairs import Texts
from octavo.errors import InvalidRequest, quote
from octavo.server.generate.scoring import NOT_OFFERED as SCORE_NOT_OFFERED
from octavo.server.generate.scoring import ScoringFields, parse_pairs, read_texts
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Documents, Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")  # the last two are llama.cpp's
NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **SCORE_NOT_OFFERED,
    "max_chunks_per_doc": (1,),
    "rank_fields": (["text"],),
}


class RerankRequest(ScoringFields):
    query: str
    documents: Documents
    top_n: int | None = None  # None or 0: all
    return_documents: bool | None = None  # Jina's and Cohere's; None: yes, as vLLM


RERANK = RouteSchema("rerank", PATHS[0], RerankRequest, NOT_OFFERED)
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [
    RERANK,
    *(RouteSchema(f"rerank {path}", path, RerankRequest, NOT_OFFERED) for path in PATHS[1:]),
]


class RerankDocument(msgspec.Struct, frozen=True, gc=False):
    text: str


class Ranked(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankUsage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    total_tokens: int


class Reranked(msgspec.Struct, frozen=True, gc=False):
    id: str
    model: str
    usage: RerankUsage
    results: list[Ranked]


SHAPES = dict.fromkeys((f"POST {path}" for path in PATHS), Shape(Reranked))


def router(service: Service) -> APIRouter:
    router = APIRouter()

    async def rerank(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, RERANK, service.config)
        await service.check_model(fields.model)
        if fields.top_n is not None and fields.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 0, got {quote(fields.top_n)}", param="top_n")
        query, documents = (
            Texts([fields.query], ["query"]),
            read_texts(fields.documents, "documents", takes_objects=True),
        )
        scoring = await parse_pairs(service, fields, query, documents, arrived, "rerank")
        service.submit(scoring.requests)
        scores = await while_connected(scoring.scores(service), service.track)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: fields.top_n or None]
        shown = (RerankDocument(text) for text in documents.texts)
        texts = dict(enumerate(shown)) if fields.return_documents is not False else {}
        results = [Ranked(index, scores[index], texts.get(index)) for index in best]
        usage = RerankUsage(scoring.num_tokens, scoring.num_tokens)
        return json_response(Reranked(scoring.response_id, service.answering_name, usage, results), fields.ignored)

    for path in PATHS:
        router.post(path)(rerank)
    return router
