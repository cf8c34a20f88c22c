"""HTTP connections: received from the supervisor, refused where descriptors run out, and closed after their time limits.

A client has Patience.request to send a request's head (middleware.py limits the body) and Patience.reader to read any of a
response. Checked once a second, which costs less than timers for every request."""

import asyncio
import contextlib
import fcntl
import functools
import http
import logging
import os
import resource
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.errors import EngineUnavailable, InvalidRequest, OctavoError, RequestTimeout
from octavo.ipc.launch import ApiLaunch, Patience
from octavo.server.http.errors import error_response
from octavo.server.http.middleware import new_request_id
from octavo.supervisor.acceptor import take_connections

log = logging.getLogger("octavo.server")

KEEP_ALIVE_SECONDS = 75  # longer than proxies' own, so that we never close under a request
LOOK_TICKS = 10  # uvicorn ticks ten times a second
NO_ROOM_RETRY_AFTER = 5
COMPLAINT_SECONDS = 60.0  # between two equal log lines


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with time limits."""

    def __init__(self, *, is_refused: bool, **options: Any) -> None:
        super().__init__(**options)
        now = self.loop.time()
        self._opened = now
        self._answered = now  # when the last request was answered
        self._head_begun: float | None = None  # None: no partial request head
        self._is_spoilt = False  # the input is no longer valid HTTP
        self._unsent = 0
        self._moved = now  # when that last changed
        if is_refused:
            self.app: Any = _no_room

    # ── parser callbacks ──

    def on_message_begin(self) -> None:
        self._head_begun = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_begun = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._answered = self.loop.time()
        super().on_response_complete()
        if self._is_spoilt and not self.is_answering and not self.transport.is_closing():
            self._refuse_nonsense()

    # ── limits ──

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_owed(self) -> bool:
        """Whether sent bytes wait here for the client to read them."""
        return self.transport.get_write_buffer_size() > 0

    def look(self, now: float, patience: Patience) -> None:
        if self.is_stuck(now, patience.reader):
            self.transport.abort()
        elif self.is_answering or self.transport.is_closing():
            pass
        elif self._head_begun is not None:
            if now - max(self._head_begun, self._answered) > patience.request:
                self.refuse(RequestTimeout(f"the request head did not arrive completely within {patience.request:g} s"))
        elif now - max(self._opened, self._answered) > KEEP_ALIVE_SECONDS:
            self.transport.close()

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Whether the client has read nothing for so long although bytes wait. To be called regularly."""
        if not self.is_owed:
            self._unsent, self._moved = 0, now
            return False
        unsent = self.transport.get_write_buffer_size() + self._num_in_kernel()
        if unsent != self._unsent:
            self._unsent, self._moved = unsent, now
        return now - self._moved > seconds

    def _num_in_kernel(self) -> int:
        """Unsent bytes in the kernel's buffer: a slow client drains these for minutes before more of ours fit."""
        try:
            descriptor = self.transport.get_extra_info("socket").fileno()
            (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # not available on every system
            return 0
        return int(size)

    # ── refusals ──

    def data_received(self, data: bytes) -> None:
        if not self._is_spoilt:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP, after the requests before it are answered."""
        if self.is_answering and (not self.cycle.more_body or self.cycle.response_started or self.pipeline):
            self._is_spoilt = True
        else:
            self._refuse_nonsense()

    def _refuse_nonsense(self) -> None:
        self.refuse(InvalidRequest("this is not a valid HTTP request"))

    def refuse(self, error: OctavoError) -> None:
        """Send an error response and close. Only before a response has started."""
        request_id = new_request_id()
        response = error_response(error, request_id)
        response.headers.update({"x-request-id": request_id, "connection": "close"})
        lines = [b"HTTP/1.1 %d %b" % (response.status_code, http.HTTPStatus(response.status_code).phrase.encode())]
        lines += [b"%b: %b" % header for header in [*self.server_state.default_headers, *response.raw_headers]]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    message = "this server has too many open connections (limit of open files, ulimit -n): try again later"
    error = EngineUnavailable(message, NO_ROOM_RETRY_AFTER)
    request_id = new_request_id()
    response = error_response(error, request_id, scope["method"], scope["path"])
    response.headers.update({"x-request-id": request_id, "connection": "close"})
    await response(scope, receive, send)


class HttpServer(uvicorn.Server):
    """uvicorn with connections from the supervisor, and without its signal handlers: it would stop listening at the first signal,
    and clients could not be asked to retry.

    A new descriptor has the lowest free number, so its number shows how many are in use. Connections are refused
    within two reserves of the limit (an eighth of it each, at most 1,024); within the last one, they wait in the supervisor."""

    def __init__(self, config: uvicorn.Config, channel: socket.socket, patience: Patience) -> None:
        super().__init__(config)
        self._channel = channel
        self._patience = patience
        self._opening: set[asyncio.Task[Any]] = set()
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(1024, self._limit // 8)
        self._refused_from, self._full_from = self._limit - 2 * reserve, self._limit - reserve
        self._is_full = False
        self._complained = float("-inf")

    @property
    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    @property
    def has_unsent(self) -> bool:
        return any(connection.is_owed for connection in self._connections)

    def hang_up(self, seconds: float) -> int:
        """Close connections whose client has read nothing for so long. → how many."""
        now = asyncio.get_running_loop().time()
        stuck = [connection for connection in self._connections if connection.is_stuck(now, seconds)]
        for connection in stuck:
            connection.transport.abort()
        return len(stuck)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take_in)
        sys.stdout.buffer.write(b'{"ready":true}\n')
        sys.stdout.buffer.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close_channel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._connections:
                connection.look(now, self._patience)
            self._look_for_room()
        return await super().on_tick(counter)

    def _take_in(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connections = take_connections(self._channel, self._full_from)
        except (EOFError, ConnectionError):  # the supervisor has ended: standard input shows it too
            return self._close_channel()
        for connection in connections:
            is_refused = connection.fileno() >= self._refused_from
            if is_refused:
                self._complain()
            connection.setblocking(False)
            protocol = functools.partial(self._protocol, is_refused)
            task = loop.create_task(loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl))
            self._opening.add(task)
            task.add_done_callback(self._opened)
        if connections and connections[-1].fileno() >= self._full_from:
            self._is_full = True
            loop.remove_reader(self._channel.fileno())

    def _look_for_room(self) -> None:
        """Reserve a descriptor again if it was spent; connections are accepted again then."""
        if self._is_full and self._channel.fileno() >= 0:
            with contextlib.suppress(OSError):  # still none free
                probe = os.dup(self._channel.fileno())
                os.close(probe)
                if probe < self._full_from:
                    self._is_full = False
                    asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take_in)

    def _complain(self) -> None:
        if time.monotonic() - self._complained > COMPLAINT_SECONDS:
            self._complained = time.monotonic()
            log.error(
                "%d connections are open, close to this process's limit of open files (%d): new ones get status 503 or "
                "wait; raise the hard limit (ulimit -Hn)",
                len(self.server_state.connections),
                self._limit,
            )

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a connection could not be opened: %s", error)  # the client has disconnected

    def _protocol(self, is_refused: bool) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            is_refused=is_refused,
        )

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(order: ApiLaunch, app: object) -> HttpServer:
    server = order.config.server
    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=server.uvicorn_log_level,
            access_log=False,
            server_header=False,
            ssl_certfile=server.ssl_certfile or None,
            ssl_keyfile=server.ssl_keyfile or None,
            ssl_ca_certs=server.ssl_ca_certs or None,
            # Naming authorities means that clients must present a certificate signed by them.
            ssl_cert_reqs=ssl.CERT_REQUIRED if server.ssl_ca_certs else ssl.CERT_NONE,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        ),
        socket.socket(fileno=order.fd),
        order.patience,
    )
