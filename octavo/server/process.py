"""An API process: loads the tokenizer and builds the application while the engine loads, then serves the connections that it is
passed, then drains. The supervisor starts it with one line of JSON on standard input.

Standard input stays open for as long as the supervisor lives: end of file means stop at once. The process writes one line to
standard output when it accepts requests. Exit codes: 0 stopped in order, 1 responses were cut off or the engine was lost, 2 a
start-up error."""

import gc

if __name__ == "__main__":
    gc.disable()  # a start makes two hundred thousand objects that stay: collecting meanwhile would find nothing

import asyncio
import contextlib
import functools
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

from octavo.client.client import EngineClient, ZmqClient
from octavo.client.inflight_limit import InflightLimit
from octavo.errors import ConfigError, EngineDead
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import ApiLaunch, tell_supervisor
from octavo.ipc.memory_trim import drop_library_pages, keep_one_heap, trim_heap
from octavo.ipc.stderr import settle_standard_error
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.observe import logs
from octavo.server.http.connections import HttpServer, http_server
from octavo.server.prepare import prepare
from octavo.server.state.service import Service

log = logging.getLogger("octavo.server")

BEAT_SECONDS = 0.5  # between two heartbeats of the event loop
IDLE_OBJECTS = 1000  # new objects that are worth a collection of about a tenth of a millisecond
IDLE_BEATS = 3  # heartbeats without a request, after which memory is given back
SWITCH_SECONDS = 0.001
"""How long a thread may run Python while the event loop waits for the GIL. With Python's own 5 ms, four busy threads made a request
wait for 70 ms at the median, and for seconds at worst."""
DRAIN_LOOK_SECONDS = 0.1
LAST_EVENT_SECONDS = 1.0  # for responses that are cut off to send their last event
ORPHAN_SECONDS = 4.0  # without a supervisor; an orderly stop takes less


class StopRequest:
    """Requests to stop: SIGTERM and SIGINT ask to drain. If the supervisor dies, the process stops at once, or after
    ORPHAN_SECONDS if its event loop hangs."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the sockets. The supervisor removes it; if supervisor and engine were both killed, this process does."""
        self.given = asyncio.Event()
        self.abandoned = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.given.set)
        threading.Thread(target=self._watch_supervisor, args=(loop, folder), daemon=True).start()

    def _watch_supervisor(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending already
            loop.call_soon_threadsafe(self._abandon)
        time.sleep(ORPHAN_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    def _abandon(self) -> None:
        self.abandoned.set()
        self.given.set()


def main() -> int:
    keep_one_heap()
    signal_at_parents_end(signal.SIGCONT)  # wakes a stopped process, so that it sees the end of its standard input
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiLaunch)
    level = logging.INFO if launch.config.server.enable_log_requests else logging.WARNING
    logs.install(level, launch.config.server.log_format)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(_run(launch))
        except ConfigError as error:
            log.error("%s", error.message)
            return 2
        except EngineDead as error:
            log.error("%s", error.message)
            return 1


async def _run(launch: ApiLaunch) -> int:
    drop_library_pages()  # read by imports; pages that serving needs fault back while the engine loads
    folder = Path(launch.reply_address.removeprefix("ipc://")).parent
    stop = StopRequest(folder)
    client = _client(launch)
    try:
        preparing = prepare(client, launch.model_path, launch.model_name, launch.config, launch.default_sampling)
        app = await _unless_stopped(stop, preparing)
        if app is None:
            return 0
        service: Service = app.state.service
        service.patience = launch.patience
        service.hints.recording = launch.recording
        await service.peers.open(folder, launch.origin)
        service.adapters.open(folder)
        service.records.open(folder)
        try:
            return await _serve(
                launch, service, http_server(launch, app, functools.partial(service.refused, "malformed")), stop
            )
        finally:
            service.peers.close()
    finally:
        client.close()
        if stop.abandoned.is_set():
            shutil.rmtree(folder, ignore_errors=True)


def _client(launch: ApiLaunch) -> EngineClient:
    limits = launch.config.scheduler
    most = (limits.max_waiting_requests, limits.max_waiting_tokens)
    if launch.fleet_secret:
        from octavo.client.fleet import FleetClient  # it brings numpy, which one engine needs no router for

        return FleetClient(
            launch.config.fleet,
            launch.replicas,
            launch.fleet_secret,
            launch.origin,
            launch.supervisor_address,
            launch.heartbeat_fd,
            most,
            launch.num_servers,
            tell_supervisor,
        )
    heartbeat = Heartbeat(launch.heartbeat_fd) if launch.heartbeat_fd >= 0 else None
    inflight_limit = None
    if heartbeat is not None:
        inflight_limit = InflightLimit(heartbeat, launch.origin, *most, launch.num_servers)
    addresses = (launch.engine_address, launch.reply_address)
    return ZmqClient(*addresses, launch.origin, launch.supervisor_address, heartbeat, inflight_limit)


async def _unless_stopped(stop: StopRequest, work: Coroutine[Any, Any, FastAPI]) -> FastAPI | None:
    """Return the result of `work`. None: the process was asked to stop first."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.given.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _beat(service: Service, origin: int) -> None:
    """Send heartbeats of this event loop. While idle, collect the reference cycles that past requests have left, about fifty
    objects each; after IDLE_BEATS without a request, give freed memory back to the system."""
    heartbeat, num_seen, num_idle = service.engine.heartbeat, 0, 0
    while True:
        if heartbeat is not None:
            heartbeat.api_beat(origin)
        num_idle = num_idle + 1 if service.idle.is_set() and service.num_requests == num_seen else 0
        num_seen = service.num_requests
        if num_idle == IDLE_BEATS:
            trim_heap()
        elif service.idle.is_set() and gc.get_count()[0] > IDLE_OBJECTS:
            gc.collect(1)
        await asyncio.sleep(BEAT_SECONDS)


def settle_collector() -> None:
    # The objects alive now stay alive: exempt them from collection.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 100)  # the objects of a token form no cycles, so collect rarely; see _beat()


async def _serve(launch: ApiLaunch, service: Service, server: HttpServer, stop: StopRequest) -> int:
    settle_collector()
    sys.setswitchinterval(SWITCH_SECONDS)
    serving = asyncio.create_task(server.serve())
    background = asyncio.create_task(service.run_background())
    beating = asyncio.create_task(_beat(service, launch.origin))
    waiting = asyncio.create_task(stop.given.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    is_clean = await _drain(service, server, launch.config.server.shutdown_timeout, stop)
    background.cancel()
    await asyncio.wait({background})
    server.should_exit = True
    await serving
    beating.cancel()
    service.compiler.close()
    service.adapters.close()
    service.tenants.close()
    if service.traces is not None:
        await asyncio.to_thread(service.traces.close)
    return 0 if is_clean else 1


async def _drain(service: Service, server: HttpServer, seconds: float, stop: StopRequest) -> bool:
    """Refuse new requests, let running ones finish and let clients read their answers. False: some answers were cut off."""
    service.drain()
    service.live.close()
    num_hung_up = 0
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not stop.abandoned.is_set():
        if service.idle.is_set() and not server.has_unsent:
            break
        if not service.engine.num_running:  # only readers are left to wait for: disconnect clients that do not read
            num_hung_up += server.hang_up(service.patience.farewell)
        awaited = [stop.abandoned] if service.idle.is_set() else [stop.abandoned, service.idle]
        await _any_of(*awaited, seconds=min(left, DRAIN_LOOK_SECONDS))
    if service.idle.is_set():
        return not num_hung_up and not server.has_unsent
    service.stop()
    await _any_of(service.idle, seconds=LAST_EVENT_SECONDS)
    return False


async def _any_of(*events: asyncio.Event, seconds: float) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available for every platform
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    code = main()
    settle_standard_error()
    sys.exit(code)
