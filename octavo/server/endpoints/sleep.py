"""POST /sleep, POST /wake_up and GET /is_sleeping, as vLLM names them: an engine without requests gives memory back and keeps its weights.
With API keys, only an admin key may do so."""

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import Forbidden, Unsupported
from octavo.messages import ASLEEP, ReadSleep, SleepEngine, WakeEngine
from octavo.server.http.sse import owner_of
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service


class Sleeping(msgspec.Struct, frozen=True):
    is_sleeping: bool


SHAPES = {route: Shape(Sleeping) for route in ("POST /sleep", "POST /wake_up", "GET /is_sleeping")}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/sleep")
    async def sleep(request: Request) -> Response:
        _check(service, request)
        if (level := request.query_params.get("level", "1")) != "1":
            raise Unsupported(
                f"level must be 1, got {level[:20]!r}: this server keeps its weights while it sleeps; one that is started with models by name "
                "(octavo serve NAME=MODEL) can drop them with level 2",
                param="level",
            )
        return _answer(await service.engine.control(SleepEngine(call=0)))

    @router.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        _check(service, request)
        if "tags" in request.query_params:
            raise Unsupported("tags: weights and KV pages wake up together; leave it out", param="tags")
        return _answer(await service.engine.control(WakeEngine(call=0)))

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return _answer(await service.engine.control(ReadSleep(call=0)))

    return router


def _check(service: Service, request: Request) -> None:
    service.accept()
    if not service.owners.is_admin(owner_of(request)):
        raise Forbidden("only an admin key may put the engine to sleep: start the server with --admin-key", "key")


def _answer(state: str) -> Response:
    return Response(msgspec.json.encode(Sleeping(state == ASLEEP)), media_type="application/json")
