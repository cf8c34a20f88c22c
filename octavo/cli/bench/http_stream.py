"""A small HTTP/1.1 client on asyncio streams: POST, and server-sent events as they arrive. It is small so that the benchmark does
not measure its own client."""

import asyncio
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass

from octavo.errors import ConfigError

_LIMIT = 2**20  # longest header or SSE line


class HTTPFailure(Exception):
    """The server's status was not 200, or its response was not HTTP. `status` is 0 if there was no response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address: a parsed base URL without /v1."""

    host: str
    port: int
    tls: bool
    prefix: str

    @staticmethod
    def parse(url: str) -> "Target":
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--base-url {url!r} is not a URL: give http://HOST:PORT")
        tls = parts.scheme == "https"
        return Target(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


class Client:
    """An HTTP client that keeps connections open between requests; a connection carries one request at a time."""

    def __init__(self, target: Target, api_key: str = "") -> None:
        self._target = target
        self._ssl = ssl.create_default_context() if target.tls else None
        host = f"[{target.host}]" if ":" in target.host else target.host
        self._headers = f"Host: {host}:{target.port}\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> bytes:
        head = f"GET {self._target.prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()
        return b"".join([part async for part in self._exchange(head)])

    async def post(self, path: str, body: bytes) -> bytes:
        return b"".join([part async for part in self._exchange(self._post(path, body))])

    async def post_events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yield the payload of each `data:` line as it arrives."""
        rest = b""
        async for part in self._exchange(self._post(path, body)):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        if rest.startswith(b"data:"):
            yield rest[5:].strip()

    def _post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {self._target.prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, request: bytes) -> AsyncIterator[bytes]:
        """Send a request and yield the body of a 200 response in pieces. The connection is kept only if the body was read to its
        end."""
        connection, status = await self._send(request)
        try:
            if status != 200:
                body = b"".join([part async for part in connection.body()])
                raise HTTPFailure(status, body.decode(errors="replace")[:2000])
            async for part in connection.body():
                yield part
        except (ValueError, asyncio.IncompleteReadError) as error:
            connection.abort()
            raise HTTPFailure(0, f"the connection broke off: {error}") from None
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _send(self, request: bytes) -> tuple["_Connection", int]:
        """Send a request and read the head of the response: (connection, status)."""
        while self._idle:
            connection = self._idle.pop()
            # A server may close an idle connection at any moment: only the failure of a new connection counts.
            try:
                return connection, await connection.ask(request)
            except (OSError, HTTPFailure):
                connection.abort()
        reader, writer = await asyncio.open_connection(
            self._target.host, self._target.port, ssl=self._ssl, limit=_LIMIT
        )
        connection = _Connection(reader, writer)
        try:
            return connection, await connection.ask(request)
        except BaseException:
            connection.abort()
            raise


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.reusable = False
        self._length: int | None = None  # None: chunked, or until the server closes
        self._chunked = False

    def abort(self) -> None:
        self._writer.transport.abort()

    async def ask(self, request: bytes) -> int:
        """Send a request, read the head of the response and return its status. Interim 1xx responses are skipped."""
        self._writer.write(request)
        status = 100
        try:
            while 100 <= status < 200:
                status = await self._head()
        except ValueError as error:  # not a number, or a line over the limit
            raise HTTPFailure(0, f"the head of the answer is malformed: {error}") from None
        return status

    async def _head(self) -> int:
        parts = (await self._reader.readline()).split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
            raise HTTPFailure(0, "the server closed the connection or does not speak HTTP/1.1")
        status, keep = int(parts[1]), parts[0] == b"HTTP/1.1"
        self._length, self._chunked = None, False
        while (line := await self._reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    self._length = int(value)
                case b"transfer-encoding":
                    self._chunked = b"chunked" in value.lower()
                case b"connection":
                    keep = b"close" not in value.lower()
        self.reusable = keep and (self._chunked or self._length is not None)
        return status

    async def body(self) -> AsyncIterator[bytes]:
        if self._chunked:
            while num := int((await self._reader.readline()).split(b";")[0], 16):
                yield (await self._reader.readexactly(num + 2))[:num]
            while await self._reader.readline() not in (b"\r\n", b"\n", b""):
                pass  # trailers
        elif self._length is not None:
            yield await self._reader.readexactly(self._length)
        else:
            while part := await self._reader.read(65536):
                yield part
