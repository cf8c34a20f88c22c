"""Upstream: HTTP/1.1 over a UNIX socket to one model's server. Connections are kept for the next request."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import httptools

from octavo.errors import InvalidRequest

Headers = Sequence[tuple[bytes, bytes]]

MAX_IDLE = 64  # connections that are kept
MAX_IDLE_SECONDS = (
    2.0  # that one is kept: well below the time after which the server closes it, which would look like its end
)
MAX_UNREAD = 2**18  # bytes of a response, beyond which no more is read before some are taken
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[^\x00\r\n]*")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class UpstreamGone(Exception):
    """The server does not answer, or has ended."""


class Exchange(asyncio.Protocol):
    """One connection, and one request on it at a time. Leave a request with close(), whatever happened."""

    def __init__(self, owner: "Upstream") -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._is_paused = self._is_write_paused = False
        self._why = ""  # the connection is closed
        self._waiter: asyncio.Future[None] | None = None
        self.kept_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_begun = self._is_over = self._can_be_kept = False
        self._has_head = False
        self._parts: list[bytes] = []
        self._num_unread = 0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def is_open(self) -> bool:
        return not self._why and self._transport is not None and not self._transport.is_closing()

    # ── asyncio's callbacks ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._is_begun:
            self._fail("it sent something that was not asked for")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(str(error))
            return
        if self._num_unread > MAX_UNREAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._why = self._why or (str(exc) if exc else "it closed the connection")
        self._is_write_paused = False
        self._wake()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake()

    def _fail(self, why: str) -> None:
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    # ── the parser's callbacks ──

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status, self._has_head = status, True
        self._can_be_kept = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_unread += len(data)

    def on_message_complete(self) -> None:
        self._is_over = self._has_head

    # ── the request ──

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request and wait for the head of its response. Raises UpstreamGone, and InvalidRequest for a head that cannot be sent."""
        if not self.is_open or self._transport is None:
            raise UpstreamGone(self._why or "it closed the connection")
        self._is_begun = True
        self._transport.write(_head(method, target, headers))
        if body:
            self._transport.write(body)
        while self._is_write_paused and not self._why:
            await self._news()
        while not self._has_head:
            if self._why:
                raise UpstreamGone(self._why)
            await self._news()

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of the response as they arrive; what has arrived together comes together. Raises UpstreamGone where it is cut off."""
        while True:
            if self._parts:
                parts, self._parts, self._num_unread = self._parts, [], 0
                if self._is_paused and self._transport is not None:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield parts[0] if len(parts) == 1 else b"".join(parts)
            elif self._is_over:
                return
            elif self._why:
                raise UpstreamGone(self._why)
            else:
                await self._news()

    def close(self) -> None:
        """Keep the connection if the response was read to its end; otherwise close it, which ends the request."""
        is_done = self._is_over and not self._parts and self._can_be_kept and self.is_open
        if is_done and not self._owner.is_closed and len(self._owner.idle) < MAX_IDLE:
            self._reset()
            self.kept_since = time.monotonic()
            self._owner.idle.append(self)
        elif self._transport is not None:
            self._transport.close()


def _head(method: str, target: bytes, headers: Headers) -> bytes:
    """Raises InvalidRequest for what could be taken for another head."""
    if not _TARGET.fullmatch(target):
        raise InvalidRequest("the request's target has characters that HTTP does not allow")
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidRequest(f"the request's header {name[:60].decode('latin-1')!r} is not valid HTTP/1.1")
    lines = [b"%b %b HTTP/1.1" % (method.encode("latin-1"), target), *(b"%b: %b" % each for each in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


class Upstream:
    def __init__(self, path: str) -> None:
        self.path = path
        self.idle: list[Exchange] = []
        self.is_closed = False

    async def open(self) -> Exchange:
        """A connection: a kept one, or a new one. Raises UpstreamGone."""
        while self.idle:
            kept = self.idle.pop()
            if time.monotonic() - kept.kept_since < MAX_IDLE_SECONDS and kept.is_open:
                return kept
            kept.close()
        self.is_closed = False
        try:
            _, exchange = await asyncio.get_running_loop().create_unix_connection(lambda: Exchange(self), self.path)
        except OSError as error:
            raise UpstreamGone(str(error)) from None
        return exchange

    async def ask(
        self, target: bytes, headers: Headers, seconds: float = 10.0, method: str = "GET"
    ) -> tuple[int, bytes]:
        """GET a whole answer, or POST without a body. Raises UpstreamGone."""
        try:
            async with asyncio.timeout(seconds):
                exchange = await self.open()
                try:
                    if method != "GET":
                        headers = [*headers, (b"content-length", b"0")]
                    await exchange.send(method, target, headers, b"")
                    return exchange.status, b"".join([part async for part in exchange.body()])
                finally:
                    exchange.close()
        except TimeoutError:
            raise UpstreamGone(f"it has not answered for {seconds:g} s") from None

    async def answers(self, path: str) -> bool:
        """Whether GET `path` is answered with 200."""
        try:
            return (await self.ask(path.encode(), [(b"host", b"localhost")], 5.0))[0] == 200
        except UpstreamGone:
            return False

    def close(self) -> None:
        """Close the connections that are kept; those in use are closed when their exchange ends."""
        self.is_closed = True
        while self.idle:
            self.idle.pop().close()
