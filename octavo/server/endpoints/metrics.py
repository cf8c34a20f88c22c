"""GET /metrics: the engine's metrics, and those of the server's processes, as Prometheus text."""

import asyncio

from fastapi import APIRouter, Response

from octavo.messages import ReadMetrics
from octavo.observe.metrics.process_metrics import process_metrics
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service
from octavo.server.threads import Pool

PROCESSES = Pool("process metrics", num_threads=1, max_waiting=1)
"""Reads /proc: a process with thousands of connections has as many descriptors to count. Requests that come meanwhile share it."""

SHAPES = {"GET /metrics": Shape(media=("text/plain",))}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    reading: asyncio.Future[str] | None = None

    @router.get("/metrics")
    async def metrics() -> Response:
        nonlocal reading
        text = await service.query(ReadMetrics(call=0))
        if reading is None or reading.done():
            reading = PROCESSES.submit(process_metrics)
        text += await asyncio.shield(reading)
        text += service.tenants.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
