"""GET /v1/requests and /v1/requests/{id}: where the time of a request went, and why it waited. A key sees its own requests."""

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import EngineUnavailable, InvalidRequest, NotFound
from octavo.messages import ReadJourneys
from octavo.observe.journeys.journey import STATES, Journey
from octavo.observe.journeys.stages import EngineJourney, Stage
from octavo.server.http.sse import viewer_of
from octavo.server.schema.shapes import Shape
from octavo.server.state.owners import Viewer
from octavo.server.state.service import Service

MAX_LIMIT = 1000
PARAMETERS = ("state", "limit")

_journeys = msgspec.json.Decoder(list[Journey])
_parts = msgspec.json.Decoder(list[EngineJourney])


class JourneyList(msgspec.Struct, frozen=True):
    data: list[Journey]
    object: str = "list"


SHAPES = {"GET /v1/requests": Shape(JourneyList), "GET /v1/requests/{request_id}": Shape(Journey)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/requests/{request_id}")
    async def one(request_id: str, request: Request) -> Response:
        viewer = viewer_of(service, request)
        return _json(_shown(service, await _find(service, request_id, viewer), viewer))

    @router.get("/v1/requests")
    async def several(request: Request) -> Response:
        state, limit = read_query(request.query_params)
        viewer = viewer_of(service, request)
        asked = ReadJourneys(call=0, state=state, limit=limit, owner=viewer.only)
        found = _journeys.decode(await service.query(asked))
        # Requests that were not submitted yet are known only to their own API process, for a few milliseconds.
        if state in ("", "running"):
            found = [journey.as_journey() for journey in service.journeys.still_here(viewer)] + found
        return _json(JourneyList([_shown(service, journey, viewer) for journey in found[:limit]]))

    return router


def _shown(service: Service, journey: Journey, viewer: Viewer) -> Journey:
    """Without words of a prompt where the viewer also sees those of other keys."""
    if not (viewer.sees_all and service.owners.has_several):
        return journey
    hidden = [_wordless(stage) for stage in journey.stages]
    legs = [msgspec.structs.replace(leg, stages=[_wordless(stage) for stage in leg.stages]) for leg in journey.legs]
    return msgspec.structs.replace(journey, stages=hidden, legs=legs)


def _wordless(stage: Stage) -> Stage:
    return msgspec.structs.replace(stage, differs_text="") if stage.differs_text else stage


async def _find(service: Service, request_id: str, viewer: Viewer) -> Journey:
    if (mine := service.journeys.find(request_id, viewer)) is not None:
        return mine.as_journey(await _engine_part(service, mine.id) if mine.requests else ())
    found = _journeys.decode(await service.query(ReadJourneys(call=0, request_id=request_id, owner=viewer.only)))
    if not found:
        raise NotFound(
            f"no request {request_id[:200]!r} is running here or among the latest that are kept (--journey-bytes)"
        )
    return found[0]


async def _engine_part(service: Service, request_id: str) -> list[EngineJourney]:
    """The engine's part of an open journey of this process. Empty while there is no engine."""
    try:
        return _parts.decode(await service.query(ReadJourneys(call=0, request_id=request_id, is_raw=True)))
    except EngineUnavailable:
        return []


def read_query(query: Mapping[str, str]) -> tuple[str, int]:
    """(state, limit). Raises InvalidRequest."""
    for name in query:
        if name not in PARAMETERS:
            raise InvalidRequest(
                f"unknown parameter {name[:60]!r}; supported are {', '.join(PARAMETERS)}", param=name[:60]
            )
    state, limit = query.get("state", ""), query.get("limit", "100")
    if state and state not in STATES:
        raise InvalidRequest(f"state must be one of {', '.join(STATES)}, got {state[:60]!r}", param="state")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT and len(limit) < 9):
        raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}, got {limit[:60]!r}", param="limit")
    return state, int(limit)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
