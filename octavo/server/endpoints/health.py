"""GET /health: 200 only while the engine's step loop turns and new requests are taken.
Knows nothing of what the loop does."""

import asyncio
import time

from fastapi import APIRouter, Response

from octavo.errors import EngineUnavailable
from octavo.messages import Ping
from octavo.server.service import Service

FRESH_SECONDS = 1.0
"""Tokens that came this recently prove the loop turns: no need to ask."""
PING_SECONDS = 5.0
"""A step may be long; a loop that does not answer in this time is stuck."""


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        service.accept()
        if time.monotonic() - service.last_heard > FRESH_SECONDS:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await service.engine.control(Ping(call=0))
            except TimeoutError:
                raise EngineUnavailable(f"the engine has not answered for {PING_SECONDS:.0f} s", 5) from None
            service.heard()
        return Response(b'{"status":"ok"}', media_type="application/json")

    return router
