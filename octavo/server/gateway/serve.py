"""`octavo serve` with several models: listens, loads them, passes requests on, and stops their servers in order."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo.config import Config, replace, split_list
from octavo.errors import ConfigError, EngineUnavailable
from octavo.ipc.launch import Patience
from octavo.ipc.stderr import hold_standard_streams, settle_standard_error
from octavo.observe import logs
from octavo.observe.logs import RareWarning
from octavo.server.gateway.app import Gateway
from octavo.server.gateway.catalog import ServedModel, read_models
from octavo.server.gateway.pool import Pool
from octavo.server.gateway.shared import Shared
from octavo.server.http.connections import http_options
from octavo.server.http.protocol import Connection, Malformed
from octavo.server.process import loop_factory
from octavo.server.state.tenants import LIMIT_HEADERS
from octavo.supervisor.acceptor import raise_descriptor_limit
from octavo.supervisor.listen import access_note, cannot_listen, check_certificates, listen, url_of
from octavo.supervisor.runtime_dir import RuntimeDir, ServerRecord, files_folder, remove_abandoned, write_record

log = logging.getLogger("octavo.gateway")

BACKLOG = 2048
GATEWAY_PART = "gateway"  # of --files-folder
LOOK_TICKS = 10  # uvicorn ticks ten times a second
MALFORMED_SECONDS = 10.0


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with the limits of Connection."""

    patience = Patience()

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in [*self.server_state.connections]:
                if isinstance(connection, Connection):
                    connection.check_times(now, self.patience)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_models(config: Config) -> int:
    """Serve until a signal. Returns the exit code: 0 stopped in order, 2 a start-up error, 3 some responses were cut off, 130 stopped at
    once."""
    hold_standard_streams()
    logs.install(logging.WARNING, config.server.log_format)
    log.setLevel(logging.INFO)
    raise_descriptor_limit()
    check_certificates(config.server)
    remove_abandoned()
    folder = RuntimeDir()
    try:
        with files_folder(_with_part(config, folder), folder.path) as config:
            models = read_models(config, folder.path)
            listener = listen(config.server.host, config.server.port)
            with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(_run(config, models, listener, folder))
    finally:
        folder.close()
        settle_standard_error()


def _with_part(config: Config, folder: RuntimeDir) -> Config:
    """With a folder for files, which the servers of the models share with the gateway."""
    if config.batches.files_part:
        raise ConfigError("--files-part is for one model: several on one port have parts by their names")
    files = config.batches.files_folder or str(folder.path / "files")
    return replace(config, files_folder=files, files_part=GATEWAY_PART)


async def _run(config: Config, models: list[ServedModel], listener: socket.socket, folder: RuntimeDir) -> int:
    started, stop = time.monotonic(), asyncio.Event()
    loop = asyncio.get_running_loop()
    wishes = config.models
    shared = Shared(config, {model.name: model.config for model in models})
    pool = Pool(
        models,
        wishes.max_loaded_models,
        wishes.model_idle_seconds,
        wishes.model_min_seconds,
        wishes.load_on_demand,
        shared.models_with_batches,
        keep=split_list(wishes.keep_loaded),
        sleep_level=wishes.model_sleep_level,
    )
    hurry = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
            pool.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    share = f"{1 / (wishes.max_loaded_models or len(models)):.0%}"
    log.info("models: %s; each has %s of the memory for KV pages", ", ".join(model.name for model in models), share)
    try:
        loading = asyncio.create_task(pool.begin())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return 0
        try:
            loading.result()
        except EngineUnavailable as error:
            raise ConfigError(error.message) from None
        code = await _serve(config, pool, shared, listener, folder, (stop, hurry), started)
    finally:
        await pool.close()
        shared.close()
    return 130 if hurry.is_set() else code


async def _serve(
    config: Config,
    pool: Pool,
    shared: Shared,
    listener: socket.socket,
    folder: RuntimeDir,
    signals: tuple[asyncio.Event, asyncio.Event],
    started: float,
) -> int:
    server, gateway, (stop, hurry) = config.server, Gateway(config, pool, shared), signals
    app: ASGIApp = gateway
    if origins := split_list(server.allowed_origins):
        app = CORSMiddleware(
            gateway,
            allow_origins=origins,
            allow_methods=split_list(server.allowed_methods),
            allow_headers=split_list(server.allowed_headers),
            allow_credentials=server.allow_credentials,
            expose_headers=["x-request-id", "x-stream-id", "retry-after", *LIMIT_HEADERS],
        )
    about_malformed = RareWarning(log, MALFORMED_SECONDS)

    def malformed(kind: Malformed) -> None:
        about_malformed(f"a request was refused: {kind}")

    protocol = functools.partial(Connection, is_refused=False, budget=config.budget, on_malformed=malformed)
    options = http_options(server)
    http = _HttpServer(uvicorn.Config(app, http=protocol, date_header=False, backlog=BACKLOG, **options))  # type: ignore[arg-type]
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(server.host, server.port, error) from None
    if note := access_note(server):
        log.warning("%s", note)
    url = url_of(listener, server)
    write_record(folder.path, ServerRecord(os.getpid(), url, ", ".join(pool.servers), time.time()))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    watching = [asyncio.create_task(work()) for work in (pool.watch, pool.watch_batches, shared.tenants.keep)]
    log.info("ready after %.1f s: %s", time.monotonic() - started, url)
    await asyncio.wait({serving, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping: running requests get up to %g s", server.shutdown_timeout)
    pool.is_closing = True
    shared.drain()
    ends = [asyncio.create_task(event.wait()) for event in (gateway.idle, hurry)]
    await asyncio.wait(ends, timeout=server.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    is_clean = not gateway.num_open
    for task in watching:
        task.cancel()
    http.should_exit = True
    await asyncio.gather(serving, *watching, return_exceptions=True)
    log.info("stopped" if is_clean else "stopped; some requests were cut off")
    return 0 if is_clean else 3
