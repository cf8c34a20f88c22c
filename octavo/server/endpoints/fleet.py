"""GET /v1/fleet: the replicas. POST /v1/fleet: change their number, or start them again one after the other, while serving. With API
keys, only a key that sees everything may do so."""

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.config import MAX_REPLICAS
from octavo.errors import Forbidden, InvalidRequest
from octavo.messages import FleetState, ReplicaState, ScaleFleet
from octavo.server.http.sse import viewer_of
from octavo.server.schema.fields import RequestFields, RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service


class FleetRequest(RequestFields):
    replicas: int | None = None  # how many there should be
    restart: bool | None = None  # start all of them again, one after the other


ROUTE_SCHEMA = RouteSchema("fleet", "/v1/fleet", FleetRequest, {})
SHAPES = {"GET /v1/fleet": Shape(FleetState), "POST /v1/fleet": Shape(FleetState)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/fleet")
    async def fleet() -> Response:
        return _answer(service, 200)

    @router.post("/v1/fleet")
    async def change(request: Request) -> Response:
        service.accept()
        if viewer_of(service, request).only is not None:
            raise Forbidden("only an admin key (--admin-key) may change the fleet", "key")
        wish = await read_fields(request, ROUTE_SCHEMA, service.config)
        if wish.replicas is None and not wish.restart:
            raise InvalidRequest("give replicas (a number), or restart: true", param="replicas")
        if wish.replicas is not None and not 1 <= wish.replicas <= MAX_REPLICAS:
            raise InvalidRequest(
                f"replicas must be between 1 and {MAX_REPLICAS}, got {wish.replicas}", param="replicas"
            )
        service.engine.scale(ScaleFleet(wish.replicas or 0, bool(wish.restart)))
        return _answer(service, 202)

    return router


def _answer(service: Service, status: int) -> Response:
    """The fleet as the supervisor last announced it. A server without one shows its engine as the only replica."""
    state = service.engine.fleet
    if state is None:
        is_ready = service.engine.report is not None and not service.engine.is_recovering
        only = ReplicaState(0, "ready" if is_ready else "restarting", 1, service.engine.num_restarts)
        state = FleetState([only], 1)
    return Response(msgspec.json.encode(state), status, media_type="application/json")
