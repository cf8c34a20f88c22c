"""GET /openapi.json: what this server accepts and returns."""

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

SHAPES = {"GET /openapi.json": Shape(dict[str, Any])}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    made: list[bytes] = []

    @router.get("/openapi.json")
    async def openapi_document() -> Response:
        if not made:
            made.append(msgspec.json.encode(service.openapi()))
        return Response(made[0], media_type="application/json")

    return router
