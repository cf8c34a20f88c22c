"""GET /version.
Knows nothing of the engine."""

from typing import Literal

import msgspec
from fastapi import APIRouter, Response

from octavo.server.service import Service, version
from octavo.server.shapes import Shape

SHAPES = {"GET /version": Shape(dict[Literal["version"], str])}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/version")
    async def read_version() -> Response:
        return Response(msgspec.json.encode({"version": version()}), media_type="application/json")

    return router
