"""HttpServer: takes connections from the supervisor, and refuses them where descriptors run out."""

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from octavo.config import BudgetConfig, ServerConfig
from octavo.ipc.launch import ApiLaunch, Patience, tell_supervisor
from octavo.messages import ServerReady
from octavo.observe.logs import RareWarning
from octavo.server.http.protocol import KEEP_ALIVE_SECONDS, Connection, Malformed
from octavo.supervisor.acceptor import take_connections

log = logging.getLogger("octavo.server")

LOOK_TICKS = 10  # uvicorn ticks ten times a second
COMPLAINT_SECONDS = 60.0  # between two equal log lines
MALFORMED_SECONDS = 10.0  # between two lines about requests that are not HTTP


class HttpServer(uvicorn.Server):
    """uvicorn with connections from the supervisor, and without its signal handlers: it would stop listening at the first signal,
    and clients could not be asked to retry.

    A new descriptor has the lowest free number, so its number shows how many are in use. Connections are refused
    within two reserves of the limit (an eighth of it each, at most 1,024); within the last one, they wait in the supervisor."""

    def __init__(
        self,
        config: uvicorn.Config,
        channel: socket.socket,
        patience: Patience,
        budget: BudgetConfig,
        count_malformed: Callable[[Malformed], None],
    ) -> None:
        super().__init__(config)
        self._channel = channel
        self._patience = patience
        self._budget = budget
        self._count_malformed = count_malformed
        self._about_malformed = RareWarning(log, MALFORMED_SECONDS)
        self._about_opening = RareWarning(log, MALFORMED_SECONDS)
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
        return any(connection.has_unread for connection in self._connections)

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
        tell_supervisor(ServerReady())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close_channel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._connections:
                connection.check_times(now, self._patience)
            self._look_for_room()
            self._about_malformed.flush()
            self._about_opening.flush()
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
            self._about_opening(
                f"a connection could not be opened: {error}"
            )  # the client has disconnected, or speaks no TLS

    def _protocol(self, is_refused: bool) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            is_refused=is_refused,
            budget=self._budget,
            on_malformed=self._malformed,
        )

    def _malformed(self, kind: Malformed) -> None:
        self._count_malformed(kind)
        what = (
            "not valid HTTP"
            if kind == "syntax"
            else "its head or its trailers exceed --max-head-bytes or --max-headers"
        )
        self._about_malformed(f"a request was refused: {what}")

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(launch: ApiLaunch, app: object, count_malformed: Callable[[Malformed], None]) -> HttpServer:
    return HttpServer(
        uvicorn.Config(app, http="httptools", **http_options(launch.config.server)),  # type: ignore[arg-type]
        socket.socket(fileno=launch.fd),
        launch.patience,
        launch.config.budget,
        count_malformed,
    )


def http_options(server: ServerConfig) -> dict[str, Any]:
    """Of uvicorn.Config."""
    return {
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": server.uvicorn_log_level,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # browsers.py alone reads X-Forwarded-*
        "ssl_certfile": server.ssl_certfile or None,
        "ssl_keyfile": server.ssl_keyfile or None,
        "ssl_ca_certs": server.ssl_ca_certs or None,
        # Naming authorities means that clients must present a certificate signed by them.
        "ssl_cert_reqs": ssl.CERT_REQUIRED if server.ssl_ca_certs else ssl.CERT_NONE,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": 1,
    }
