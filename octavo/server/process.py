"""An API process: builds the application while the engine loads, then serves the connections it receives, then drains.

Started by the supervisor with one JSON line on standard input, which stays open for as long as the supervisor lives. One line on
standard output says that requests are accepted. Exit codes: 0 stopped in order, 1 responses were cut off or the engine was lost,
2 a start-up mistake."""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from octavo.client.client import ZmqClient
from octavo.client.inflight_limit import InflightLimit
from octavo.errors import ConfigError, EngineDead
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import ApiLaunch
from octavo.ipc.memory_trim import drop_library_pages, keep_one_heap, trim_heap
from octavo.ipc.stderr import settle_standard_error
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.observe import logs
from octavo.server.http.connections import HttpServer, http_server
from octavo.server.prepare import prepare
from octavo.server.state.service import Service

log = logging.getLogger("octavo.server")

TURN_SECONDS = 0.5  # between two heartbeats of the event loop
IDLE_OBJECTS = 1000  # new objects that justify a garbage collection of about 0.1 ms
RESTED_TURNS = 3  # without a request, before free memory is returned
DRAIN_LOOK_SECONDS = 0.1
FAREWELL_SECONDS = 1.0  # for a cancelled response to send its error
ORPHAN_SECONDS = 4.0  # without a supervisor: an orderly end takes less


class StopOrder:
    """SIGTERM and SIGINT ask to drain; the supervisor's death asks to stop at once, even if the event loop hangs."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the sockets, normally removed by the supervisor, and by this process if the supervisor was killed."""
        self.given = asyncio.Event()
        self.abandoned = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.given.set)
        threading.Thread(target=self._watch_supervisor, args=(loop, folder), daemon=True).start()

    def _watch_supervisor(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # closed: the process is ending already
            loop.call_soon_threadsafe(self._abandon)
        time.sleep(ORPHAN_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    def _abandon(self) -> None:
        self.abandoned.set()
        self.given.set()


def main() -> int:
    keep_one_heap()
    signal_at_parents_end(signal.SIGCONT)  # a stopped process must notice the end of its standard input
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiLaunch)
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


async def _run(order: ApiLaunch) -> int:
    drop_library_pages()  # read for imports; what serving needs faults back in while the engine loads
    folder = Path(order.reply_address.removeprefix("ipc://")).parent
    stop = StopOrder(folder)
    heartbeat = Heartbeat(order.heartbeat_fd) if order.heartbeat_fd >= 0 else None
    limits, inflight_limit = order.config.scheduler, None
    if heartbeat is not None:
        most = (limits.max_waiting_requests, limits.max_waiting_tokens)
        inflight_limit = InflightLimit(heartbeat, order.origin, *most, order.num_servers)
    client = ZmqClient(
        order.engine_address, order.reply_address, order.origin, order.orders_address, heartbeat, inflight_limit
    )
    try:
        preparing = prepare(client, order.model_path, order.model_name, order.config, order.default_sampling)
        app = await _unless_stopped(stop, preparing)
        if app is None:
            return 0
        service: Service = app.state.service
        service.patience = order.patience
        await service.peers.open(folder, order.origin)
        try:
            return await _serve(order, service, http_server(order, app), stop)
        finally:
            service.peers.close()
    finally:
        client.close()
        if stop.abandoned.is_set():
            shutil.rmtree(folder, ignore_errors=True)


async def _unless_stopped(stop: StopOrder, work: Coroutine[Any, Any, FastAPI]) -> FastAPI | None:
    """`work`'s result. None: the order to stop came first."""
    task = asyncio.ensure_future(work)
    order = asyncio.ensure_future(stop.given.wait())
    await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
    order.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _turn(service: Service, origin: int) -> None:
    """Beat while this event loop runs. While idle, collect the garbage of past requests, about fifty objects in cycles each; after
    a while without requests, return free memory to the system, too."""
    heartbeat, num_seen, num_rests = service.engine.heartbeat, 0, 0
    while True:
        if heartbeat is not None:
            heartbeat.turn(origin)
        num_rests = num_rests + 1 if service.idle.is_set() and service.num_requests == num_seen else 0
        num_seen = service.num_requests
        if num_rests == RESTED_TURNS:
            trim_heap()
        elif service.idle.is_set() and gc.get_count()[0] > IDLE_OBJECTS:
            gc.collect(1)
        await asyncio.sleep(TURN_SECONDS)


def settle_collector() -> None:
    # What is alive now stays alive: exempt it from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)  # per-token objects have no cycles: collect rarely; see _turn()


async def _serve(order: ApiLaunch, service: Service, server: HttpServer, stop: StopOrder) -> int:
    settle_collector()
    serving = asyncio.create_task(server.serve())
    background = asyncio.create_task(service.run_background())
    turning = asyncio.create_task(_turn(service, order.origin))
    waiting = asyncio.create_task(stop.given.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    is_clean = await _drain(service, server, order.config.server.shutdown_timeout, stop)
    background.cancel()
    await asyncio.wait({background})
    server.should_exit = True
    await serving
    turning.cancel()
    if service.traces is not None:
        await asyncio.to_thread(service.traces.close)
    return 0 if is_clean else 1


async def _drain(service: Service, server: HttpServer, seconds: float, stop: StopOrder) -> bool:
    """Refuse new requests, let running ones finish and their responses be read. False: some were cut off."""
    service.draining = True
    service.live.close()
    num_hung_up = 0
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not stop.abandoned.is_set():
        if service.idle.is_set() and not server.has_unsent:
            break
        if not service.engine.num_running:  # only slow readers are left: those that read nothing are closed
            num_hung_up += server.hang_up(service.patience.farewell)
        awaited = [stop.abandoned] if service.idle.is_set() else [stop.abandoned, service.idle]
        await _any_of(*awaited, seconds=min(left, DRAIN_LOOK_SECONDS))
    if service.idle.is_set():
        return not num_hung_up and not server.has_unsent
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
    except ImportError:  # not available on every platform
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    code = main()
    settle_standard_error()
    sys.exit(code)
