"""Upstream: HTTP/1.1 over a UNIX socket to one model's server. Connections are kept for the next request."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import h11

from octavo.errors import InvalidRequest

Headers = Sequence[tuple[bytes, bytes]]

MAX_IDLE = 64  # connections that are kept
MAX_IDLE_SECONDS = (
    2.0  # that one is kept: well below the time after which the server closes it, which would look like its end
)
READ_BYTES = 2**16
MAX_HEAD_BYTES = 2**18


class UpstreamGone(Exception):
    """The server does not answer, or has ended."""


class Exchange:
    """One request on one connection. Leave it with close(), whatever happened."""

    def __init__(
        self, owner: "Upstream", reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: h11.Connection
    ) -> None:
        self._owner, self._reader, self._writer, self._parser = owner, reader, writer, parser
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request and wait for the head of its response. Raises UpstreamGone, and InvalidRequest for a head that cannot be sent."""
        try:
            data = self._parser.send(h11.Request(method=method, target=target, headers=list(headers)))
            data = (data or b"") + (self._parser.send(h11.Data(body)) or b"" if body else b"")
            self._writer.write(data + (self._parser.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
            while not isinstance(event := await self._next(), h11.Response):
                if isinstance(event, h11.ConnectionClosed):
                    raise UpstreamGone("it closed the connection")
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"the request's head is not valid HTTP/1.1: {error}") from None
        except (OSError, h11.ProtocolError) as error:
            raise UpstreamGone(str(error)) from None
        self.status, self.headers = event.status_code, [*event.headers]

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of the response as they arrive. Raises UpstreamGone where it is cut off."""
        try:
            while True:
                match await self._next():
                    case h11.Data(data=data):
                        yield bytes(data)
                    case h11.EndOfMessage():
                        return
                    case h11.ConnectionClosed():
                        raise UpstreamGone("it closed the connection")
        except (OSError, h11.ProtocolError) as error:
            raise UpstreamGone(str(error)) from None

    def close(self) -> None:
        """Keep the connection if the response was read to its end; otherwise close it, which ends the request."""
        states = (self._parser.our_state, self._parser.their_state)
        if states == (h11.DONE, h11.DONE) and not self._owner.is_closed and len(self._owner.idle) < MAX_IDLE:
            self._parser.start_next_cycle()
            self._owner.idle.append((time.monotonic(), self._reader, self._writer, self._parser))
        else:
            self._writer.close()

    async def _next(self) -> object:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            self._parser.receive_data(await self._reader.read(READ_BYTES))
        return event


class Upstream:
    def __init__(self, path: str) -> None:
        self.path = path
        self.idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter, h11.Connection]] = []
        self.is_closed = False

    async def open(self) -> Exchange:
        """A connection: a kept one, or a new one. Raises UpstreamGone."""
        while self.idle:
            since, reader, writer, parser = self.idle.pop()
            if time.monotonic() - since < MAX_IDLE_SECONDS and not reader.at_eof() and not writer.is_closing():
                return Exchange(self, reader, writer, parser)
            writer.close()
        self.is_closed = False
        try:
            reader, writer = await asyncio.open_unix_connection(self.path, limit=READ_BYTES)
        except OSError as error:
            raise UpstreamGone(str(error)) from None
        return Exchange(self, reader, writer, h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES))

    async def ask(self, target: bytes, headers: Headers, seconds: float = 10.0) -> tuple[int, bytes]:
        """GET a whole answer. Raises UpstreamGone."""
        try:
            async with asyncio.timeout(seconds):
                exchange = await self.open()
                try:
                    await exchange.send("GET", target, headers, b"")
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
            self.idle.pop()[2].close()
