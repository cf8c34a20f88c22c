"""An API process: loads the text room while the engine loads, then serves what it is handed, then drains.
Knows nothing of endpoints. Started by the supervisor with one JSON line on standard input.

Standard input stays open for as long as the supervisor lives; its end means that nobody is left to serve for. One line on
standard output says that requests are taken. Exit codes: 0 stopped in order, 1 responses were cut off or the engine was
lost, 2 a start-up mistake."""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from octavo.engine.client import ZmqClient
from octavo.engine.fleet import ServerOrder
from octavo.engine.pulse import Pulse
from octavo.engine.reception import take_connections
from octavo.engine.standard_streams import settle_standard_error
from octavo.errors import ConfigError, EngineDead
from octavo.observe import logs
from octavo.server.app import build_app
from octavo.server.prepare import prepare
from octavo.server.service import Service
from octavo.text import Text

log = logging.getLogger("octavo.server")

KEEP_ALIVE_SECONDS = 75  # longer than proxies keep theirs, so that it is never us who close under a request
TURN_SECONDS = 0.5  # between two words to the supervisor that the event loop turns
IDLE_OBJECTS = 1000  # new ones, that are worth a look of about a tenth of a millisecond
FAREWELL_SECONDS = 1.0  # what a response that is cut off gets to say so


class HttpServer(uvicorn.Server):
    """uvicorn, with its connections from the supervisor, which deals them out, and with signals left to us: it would stop
    listening at the first one, and nobody could be told to retry."""

    def __init__(self, config: uvicorn.Config, channel: socket.socket) -> None:
        super().__init__(config)
        self._channel = channel
        self._opening: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take_in)
        sys.stdout.buffer.write(b'{"ready":true}\n')
        sys.stdout.buffer.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close_channel()
        await super().shutdown(sockets)

    def _take_in(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connections = take_connections(self._channel)
        except (EOFError, ConnectionError):  # the supervisor's end: standard input says so too
            return self._close_channel()
        for connection in connections:
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl))
            self._opening.add(task)
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a connection could not be opened: %s", error)  # its client is gone

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class StopOrder:
    """SIGTERM and SIGINT ask to drain; the supervisor's death asks to stop at once."""

    def __init__(self) -> None:
        self.given = asyncio.Event()
        self.abandoned = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.given.set)
        loop.add_reader(sys.stdin.fileno(), self._read_stdin)

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.abandoned.set()
            self.given.set()


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerOrder)
    level = logging.INFO if order.config.server.enable_log_requests else logging.WARNING
    logs.install(level, order.config.server.log_format)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_run(order))
        except ConfigError as error:
            sys.stderr.write(f"octavo: error: {error.message}\n")
            return 2
        except EngineDead as error:
            log.error("%s", error.message)
            return 1


async def _run(order: ServerOrder) -> int:
    stop = StopOrder()
    pulse = Pulse(order.pulse_fd) if order.pulse_fd >= 0 else None
    client = ZmqClient(order.engine_address, order.reply_address, order.origin, order.orders_address, pulse)
    try:
        text = await _unless_stopped(stop, prepare(client, order.model_path, order.config, order.default_sampling))
        if text is None:
            return 0
        app = build_app(client, text, order.config, order.model_name)
        service: Service = app.state.service
        await service.siblings.open(Path(order.reply_address.removeprefix("ipc://")).parent, order.origin)
        try:
            return await _serve(order, service, _http_server(order, app), stop)
        finally:
            service.siblings.close()
    finally:
        client.close()
        if stop.abandoned.is_set():  # the supervisor was killed, and the engine with it: nobody else is left to do it
            shutil.rmtree(Path(order.reply_address.removeprefix("ipc://")).parent, ignore_errors=True)


async def _unless_stopped(stop: StopOrder, work: Coroutine[Any, Any, Text]) -> Text | None:
    """None: the order to stop came first."""
    task = asyncio.ensure_future(work)
    order = asyncio.ensure_future(stop.given.wait())
    await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
    order.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


def _http_server(order: ServerOrder, app: object) -> HttpServer:
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
            # Authorities are named so that clients must show what these have signed.
            ssl_cert_reqs=ssl.CERT_REQUIRED if server.ssl_ca_certs else ssl.CERT_NONE,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        ),
        socket.socket(fileno=order.fd),
    )


async def _turn(service: Service, origin: int) -> None:
    """Say that this event loop turns; and while nobody waits, drop what past requests have left: about fifty objects in cycles each."""
    pulse = service.engine.pulse
    while True:
        if pulse is not None:
            pulse.turn(origin)
        if service.idle.is_set() and gc.get_count()[0] > IDLE_OBJECTS:
            gc.collect(1)
        await asyncio.sleep(TURN_SECONDS)


def settle_collector() -> None:
    # What is alive now stays alive: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)  # what a token makes and drops has no cycles: look rarely; see _turn()


async def _serve(order: ServerOrder, service: Service, server: HttpServer, stop: StopOrder) -> int:
    settle_collector()
    serving = asyncio.create_task(server.serve())
    background = asyncio.create_task(service.run_background())
    turning = asyncio.create_task(_turn(service, order.origin))
    waiting = asyncio.create_task(stop.given.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    is_clean = await _drain(service, order.config.server.shutdown_timeout, stop)
    background.cancel()
    await asyncio.wait({background})
    server.should_exit = True
    await serving
    turning.cancel()
    if service.traces is not None:
        await asyncio.to_thread(service.traces.close)
    return 0 if is_clean else 1


async def _drain(service: Service, seconds: float, stop: StopOrder) -> bool:
    """Refuse what is new, let what runs finish. False: some of it was cut off."""
    service.draining = True
    service.live.close()
    await _any_of(service.idle, stop.abandoned, seconds=seconds)
    if service.idle.is_set():
        return True
    service.stop()
    await _any_of(service.idle, seconds=FAREWELL_SECONDS)
    return False


async def _any_of(*events: asyncio.Event, seconds: float) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    code = main()
    settle_standard_error()
    sys.exit(code)
