"""Server-sent events: encoding, and EventStream, which sends them. A client that disconnects cancels the work."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import EngineError, OctavoError
from octavo.messages import ReadPlace
from octavo.server.http.errors import error_event, note
from octavo.server.state.disconnect import cut_off, while_connected
from octavo.server.state.ignored_fields import EVENT_END, name_back
from octavo.server.state.loopback import OWNER
from octavo.server.state.owners import NO_OWNER, Owners, Viewer
from octavo.server.state.service import Service

log = logging.getLogger("octavo.server")

DONE = b"data: [DONE]\n\n"
QUEUE_SECONDS = 0.5  # between two comments with the place in the queue
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients ignore it, proxies see that the stream is alive

ErrorEvent = Callable[[Exception, str], bytes]
"""(the error that ended a stream after its first byte, request id) → the stream's last event."""

_encode = msgspec.json.Encoder().encode
_MARK = os.urandom(16).hex()  # a text that no other member of an event holds


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def typed_event(body: msgspec.Struct) -> bytes:
    """An event of a tagged struct: the tag is the event's name and its data's type."""
    tag = body.__struct_config__.tag
    assert isinstance(tag, str)
    return b"event: " + tag.encode() + b"\ndata: " + _encode(body) + b"\n\n"


class Frames:
    """Events of one response that differ only in a choice's index and text: what surrounds the text is encoded once."""

    def __init__(self, build: Callable[[int, str], msgspec.Struct]) -> None:
        self._build = build
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        frame = self._frames.get(index)
        if frame is None:
            before, after = _encode(self._build(index, _MARK)).split(_encode(_MARK))
            frame = self._frames[index] = (b"data: " + before, after + b"\n\n")
        return frame[0] + _encode(text) + frame[1]


def owner_of(request: Request) -> bytes:
    """The owner of what the request makes: a digest of its API key. Empty: the server has no keys."""
    owner: bytes = request.scope.get(OWNER, NO_OWNER)
    return owner


class HasOwners(Protocol):
    @property
    def owners(self) -> Owners: ...


def viewer_of(service: HasOwners, request: Request) -> Viewer:
    """What the request's key may see."""
    return service.owners.viewer(owner_of(request))


class EventStream(Response):
    """Sends what `events` yields. The first item is awaited before the head is sent: until then an error is an HTTP status.

    Where keep-alives are configured, a comment is sent after every such interval without an event, if need be after the head.
    `error_event`: the dialect's last event for an error after the first byte. `queued`: ids of requests whose place in the
    queue is sent in comments until the first event."""

    media_type = "text/event-stream"
    frame_end = EVENT_END  # the bytes after each event

    def __init__(
        self,
        service: Service,
        events: AsyncGenerator[bytes, None],
        ignored_fields: Sequence[str] = (),
        *,
        error_event: ErrorEvent = error_event,
        keep_alive: bytes = KEEP_ALIVE,
        headers: Mapping[str, str] | None = None,
        queued: Sequence[str] = (),
    ) -> None:
        self.status_code = 200
        self.background = None
        # A buffering proxy would hold the whole stream back.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._service = service
        self._events = events
        self._ignored_fields = ignored_fields
        self._error_event = error_event
        self._keep_alive_bytes = keep_alive
        self._keep_alive_seconds = service.config.server.sse_keep_alive_interval
        self._queued = queued  # until the first event
        self._head = asyncio.Lock()  # held while the head is sent: nothing may overtake it
        self._is_head_out = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = self._deliver(send, scope["octavo.send_body"], scope["octavo.request_id"])
        await while_connected(delivery, self._service.track)

    async def _deliver(self, send: Send, send_body: Send, request_id: str) -> None:
        has_comments = self._keep_alive_seconds or self._queued
        keep_alive = asyncio.create_task(self._keep_alive(send)) if has_comments else None
        last = b""
        async with aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
                if self._ignored_fields:
                    first = name_back(first, self._ignored_fields, self.frame_end)
                self._queued = ()
                await self._send_head(send)
                self._last_sent = time.monotonic()
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for chunk in events:
                    self._last_sent = time.monotonic()
                    await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
            except asyncio.CancelledError:
                if not self._service.stopping or not self._is_head_out:
                    raise
                last = self._last_words(cut_off(), request_id)
            except Exception as error:
                if not self._is_head_out:
                    raise
                if not isinstance(error, OctavoError):
                    log.exception("request %s failed in its stream", request_id)
                last = self._last_words(error, request_id)
            finally:
                if keep_alive is not None:
                    keep_alive.cancel()
                    await asyncio.wait({keep_alive})
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _last_words(self, error: Exception, request_id: str) -> bytes:
        note(error)
        return self._error_event(error, request_id)

    async def _send_head(self, send: Send) -> None:
        async with self._head:
            if not self._is_head_out:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._is_head_out = True

    async def _keep_alive(self, send: Send) -> None:
        """Send comments while nothing else is sent: the place in the queue, or keep-alives."""
        self._last_sent = time.monotonic()
        while seconds := QUEUE_SECONDS if self._queued else self._keep_alive_seconds:
            quiet = time.monotonic() - self._last_sent
            if quiet < seconds:
                await asyncio.sleep(seconds - quiet)
                continue
            comment = await place_comment(self._service, self._queued) if self._queued else self._keep_alive_bytes
            if comment:
                await self._send_head(send)
                await send({"type": "http.response.body", "body": comment, "more_body": True})
            self._last_sent = time.monotonic()


async def place_comment(service: Service, queued: Sequence[str]) -> bytes:
    """The queue position and estimated wait of the first of these requests that is queued; empty: none is."""
    for request_id in queued:
        with contextlib.suppress(EngineError):  # e.g. being restarted: nothing to report
            if place := await service.engine.control(ReadPlace(call=0, request_id=request_id)):
                position, seconds = place.split()
                return f": queue position={position} estimate_s={seconds}\n\n".encode()
    return b""
