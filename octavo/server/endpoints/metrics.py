"""GET /metrics: the engine's metrics as Prometheus text."""

from fastapi import APIRouter, Response

from octavo.messages import ReadMetrics
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

SHAPES = {"GET /metrics": Shape(media=("text/plain",))}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        text = await service.query(ReadMetrics(call=0))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
