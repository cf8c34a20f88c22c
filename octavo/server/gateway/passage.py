"""Passage: one request on its way through the gateway: its body, the model that it names, and its response."""

import asyncio
import contextlib
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.errors import EngineUnavailable, OctavoError
from octavo.server.gateway.upstream import Exchange, UpstreamGone
from octavo.server.http.body import BodyHost, BodyLimits, BodyReader
from octavo.server.http.errors import describe
from octavo.server.http.middleware import request_id_of, route_of
from octavo.server.state.owners import NO_OWNER

MAX_ERROR_BYTES = 64 * 2**10  # of a response that becomes the last event of a stream
STREAMS = {
    "/v1/chat/completions": b"data: %b\n\ndata: [DONE]\n\n",
    "/v1/completions": b"data: %b\n\ndata: [DONE]\n\n",
    "/v1/responses": b"event: error\ndata: %b\n\n",
    "/v1/messages": b"event: error\ndata: %b\n\n",
}
"""Routes whose streams are events, in which comments are skipped; and how such a stream ends with an error."""
# Of one connection, or written anew: not passed on.
_HOP_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
     b"content-encoding", b"expect", b"x-forwarded-proto", b"x-request-id"}
)  # fmt: skip
_NOT_BACK = _HOP_HEADERS - {b"content-length", b"content-encoding", b"x-request-id"}


class _Named(msgspec.Struct):
    """What the gateway reads of a body."""

    model: str | None = None
    stream: Any = None
    previous_response_id: Any = None


_named = msgspec.json.Decoder(_Named)


class ClientLeft(Exception):
    pass


class Passage:
    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits, host: BodyHost) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.method, self.route = scope["method"], route_of(scope)
        self.arrived, self.arrived_at = time.monotonic(), time.time()
        self.headers = Headers(scope=scope)
        self.id = scope["octavo.request_id"] = request_id_of(self.headers.get("x-request-id", ""))
        self.owner = NO_OWNER
        self.query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))
        self.body_reader = BodyReader(scope, self.route, receive, limits, host)
        self.body = b""
        self.named = _Named()
        self.has_begun = False
        self.limit_headers: list[tuple[bytes, bytes]] = []  # for responses of the gateway itself
        query = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")

    @property
    def model(self) -> str:
        """The name in the query or in the body. Empty: there is none."""
        return self.query.get("model") or self.named.model or ""

    def expect_body(self) -> None:
        """Look at the head before any of the body is read. Raises TooLarge or UnsupportedEncoding."""
        self.body_reader.expect(self.headers.get("content-length", ""), self.headers.get("content-encoding", ""))

    async def read(self) -> None:
        """Read the body, and the name of the model in it."""
        parts: list[bytes] = []
        while True:
            message = await self.body_reader.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        self.body = b"".join(parts)
        if self.body[:1] in b"{ \t\r\n" and self.body:
            # A server says what is wrong with a body that cannot be read.
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                self.named = _named.decode(self.body)

    def forwarded(self) -> list[tuple[bytes, bytes]]:
        """The headers for a model's server."""
        kept = [(name, value) for name, value in self.scope["headers"] if name not in _HOP_HEADERS]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            kept.append((b"content-length", str(len(self.body)).encode()))
        proto = self.scope.get("scheme", "http").encode()
        return [*kept, (b"x-forwarded-proto", proto), (b"x-request-id", self.id.encode())]

    async def unless_left(self, work: Any) -> Any:
        """The result of `work`, which is cancelled if the client leaves first. The body must have been read."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ── the response ──

    async def relay(self, exchange: Exchange) -> None:
        """Send a server's response to the client as it comes."""
        self._forget_body()
        if self.has_begun:  # a stream that has waited for its model
            return await self._relay_stream(exchange)
        headers = [(name, value) for name, value in exchange.headers if _is_passed_back(name)]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        try:
            async for part in exchange.body():
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        except UpstreamGone as error:
            raise EngineUnavailable(f"the response was cut off: {error}") from None
        await self._send({"type": "http.response.body", "body": b""})
        return None

    async def _relay_stream(self, exchange: Exchange) -> None:
        parts = [part async for part in _at_most(exchange.body(), MAX_ERROR_BYTES)] if exchange.status != 200 else []
        if exchange.status != 200:
            await self._send(_data(STREAMS[self.route] % b"".join(parts).strip()))
        else:
            async for part in exchange.body():
                await self._send(_data(part))
        await self._send({"type": "http.response.body", "body": b""})

    def _forget_body(self) -> None:
        """A server has it: it need not be kept while the response is sent."""
        self.body = b""
        self.body_reader.release()

    async def comment(self, words: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *self.own_headers()]})
        await self._send(_data(f": {words}\n\n".encode()))

    async def end_stream(self, error: OctavoError) -> None:
        """End a stream that has begun with an error."""
        _, body = describe(error, self.id)
        await self._send(_data(STREAMS[self.route] % msgspec.json.encode(body)))
        await self._send({"type": "http.response.body", "body": b""})

    async def json(self, body: Any, status: int = 200) -> None:
        await self.respond(Response(json.dumps(body), status, media_type="application/json"))

    async def respond(self, response: Response) -> None:
        await response(self.scope, self._receive, self.send_own)

    async def send_own(self, message: Message) -> None:
        """Send a part of a response that the gateway makes."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            message["headers"] = [*message.get("headers", []), *self.own_headers()]
        await self._send(message)

    def own_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.id.encode()), *self.limit_headers]


def _is_passed_back(name: bytes) -> bool:
    """Whether a header of a server's response is for the client. Those of CORS are the gateway's own."""
    return name not in _NOT_BACK and not name.startswith(b"access-control-")


async def _at_most(parts: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in parts:
        size += len(part)
        if size <= most:
            yield part


def _data(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
