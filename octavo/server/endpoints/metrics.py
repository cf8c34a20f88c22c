"""GET /metrics: the engine's metrics as Prometheus text.
Knows nothing of any metric."""

import asyncio

from fastapi import APIRouter, Response

from octavo.errors import EngineUnavailable
from octavo.messages import ReadMetrics
from octavo.server.service import Service
from octavo.server.shapes import Shape

ANSWER_SECONDS = 10.0  # Prometheus' own default scrape timeout


SHAPES = {"GET /metrics": Shape(media=("text/plain",))}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        _ = service.report  # while the engine starts there is nobody to ask
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                text = await service.engine.control(ReadMetrics(call=0))
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not answered for {ANSWER_SECONDS:.0f} s", 5) from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
