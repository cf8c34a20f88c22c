"""GET /openapi.json: what this server takes and gives.
Knows nothing of what that is."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.server.openapi import build_document
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

SHAPES = {"GET /openapi.json": Shape(dict[str, Any])}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    made: list[bytes] = []

    @router.get("/openapi.json")
    async def openapi_document(request: Request) -> Response:
        if not made:
            made.append(msgspec.json.encode(build_document(request.app, service)))
        return Response(made[0], media_type="application/json")

    return router
