"""POST /score and /v1/score, with vLLM's shapes: how well two texts fit together."""

import time
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import InvalidRequest
from octavo.server.generate.scoring import (
    NOT_OFFERED,
    PoolingAnswer,
    ScoringFields,
    parse_pairs,
    pooling_answer,
    read_texts,
)
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Shape, TextOrTexts
from octavo.server.state.disconnect import while_connected
from octavo.server.state.service import Service

NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""vLLM's names of the two sides."""


class ScoreRequest(ScoringFields):
    queries: TextOrTexts = None
    documents: TextOrTexts = None
    items: TextOrTexts = None
    text_1: TextOrTexts = None
    text_2: TextOrTexts = None
    data_1: TextOrTexts = None
    data_2: TextOrTexts = None


SCORE = RouteSchema("score", "/score", ScoreRequest, NOT_OFFERED)
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [SCORE, RouteSchema("score v1", "/v1/score", ScoreRequest, NOT_OFFERED)]


class Score(msgspec.Struct, frozen=True, gc=False):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(PoolingAnswer[Score], frozen=True, gc=False):
    pass


SHAPES = dict.fromkeys(("POST /score", "POST /v1/score"), Shape(Scores))


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/score")
    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, SCORE, service.config)
        await service.check_model(fields.model)
        first, second = sides(fields)
        firsts, seconds = read_texts(getattr(fields, first), first), read_texts(getattr(fields, second), second)
        scoring = await parse_pairs(service, fields, firsts, seconds, arrived, "score")
        service.submit(scoring.requests)
        found = await while_connected(scoring.scores(service), service.track)
        data = [Score(index, each) for index, each in enumerate(found)]
        return pooling_answer(service, Scores, scoring.response_id, data, scoring.num_tokens, fields.ignored)

    return router


def sides(fields: ScoreRequest) -> tuple[str, str]:
    """The names by which the two sides are given: exactly one pair of NAMES."""
    given = {name for names in NAMES for name in names if getattr(fields, name) is not None}
    found = [names for names in NAMES if given == {*names}]
    if found:
        return found[0]
    pairs = ", ".join(" and ".join(names) for names in NAMES)
    said = f"got {', '.join(sorted(given))}" if given else "none of them is given"
    param = next(
        (other for one, other in NAMES if one in given and other not in given), sorted(given or {"queries"})[0]
    )
    raise InvalidRequest(f"two sides are needed, named by one of these pairs: {pairs}; {said}", param=param)
