"""GET /metrics: the engine's metrics, and those of the server's processes, as Prometheus text."""

from fastapi import APIRouter, Response

from octavo.messages import ReadMetrics
from octavo.observe.metrics.process_metrics import process_metrics
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service
from octavo.server.threads import Pool

PROCESSES = Pool("process metrics", num_threads=1, max_waiting=64)
"""Reads /proc: a process with thousands of connections has as many descriptors to count."""

SHAPES = {"GET /metrics": Shape(media=("text/plain",))}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        text = await service.query(ReadMetrics(call=0))
        text += await PROCESSES.run(process_metrics)
        text += service.tenants.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
