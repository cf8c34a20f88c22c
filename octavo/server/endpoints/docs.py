"""GET /docs: a page over /openapi.json. Its files are in static/ and load nothing from elsewhere."""

from importlib.resources import files

from fastapi import APIRouter, Response

from octavo.server.endpoints.pages import HEADERS, TYPES
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

SHAPES = {"GET /docs": Shape(media=("text/html",))}


def router(service: Service) -> APIRouter:
    page = files("octavo.server").joinpath("static", "api.html").read_bytes()
    router = APIRouter()

    @router.get("/docs")
    async def docs() -> Response:
        return Response(page, media_type=TYPES["html"], headers=HEADERS)

    return router
