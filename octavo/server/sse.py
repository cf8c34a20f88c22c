"""Events to bytes on the wire; an error event after the first byte; a client that leaves ends the work.
Knows nothing of what the events say."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import EngineUnavailable, OctavoError
from octavo.server.errors_http import ClientGone, error_event
from octavo.server.service import DRAIN_RETRY_AFTER, Service

log = logging.getLogger("octavo.server")

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_MARK = os.urandom(16).hex()  # a text that no other field holds


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class Frames:
    """Events of one response that differ in a choice's index and text alone: what surrounds the text is encoded once."""

    def __init__(self, build: Callable[[int, str], msgspec.Struct]) -> None:
        self._build = build
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        frame = self._frames.get(index)
        if frame is None:
            before, after = event(self._build(index, _MARK)).split(_encode(_MARK))
            frame = self._frames[index] = (before, after)
        return frame[0] + _encode(text) + frame[1]


async def until_gone(service: Service, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result. If the client leaves first, `work` is cancelled and ClientGone raised."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    service.track(task)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        if task.cancelled():
            raise _cut_off()
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Sends what `events` yields. Its first item is awaited before the head goes out: until then, an error is a status."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        # A proxy that buffers would turn the stream into one late answer.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._service = service
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(
            self._service, receive, self._deliver(send, scope["octavo.send_body"], scope["octavo.request_id"])
        )

    async def _deliver(self, send: Send, send_body: Send, request_id: str) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for chunk in events:
                    await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
            except asyncio.CancelledError:
                if not self._service.stopping:
                    raise
                last = error_event(_cut_off(), request_id)
            except Exception as error:
                if not isinstance(error, OctavoError):
                    log.exception("request %s failed in its stream", request_id)
                last = error_event(error, request_id)
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cut_off() -> EngineUnavailable:
    return EngineUnavailable("the server shut down before this response was complete", DRAIN_RETRY_AFTER)
