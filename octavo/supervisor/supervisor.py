"""The supervisor of `octavo serve`: starts the API processes and the engine, restarts them when they end, stops them in order."""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from octavo.config import AUTO, Config, ServerConfig, without_keys
from octavo.ipc.cores import usable_cores
from octavo.ipc.heartbeat import Heartbeat, shared_memory
from octavo.ipc.launch import ApiLaunch, EngineLaunch
from octavo.ipc.memory_trim import drop_library_pages
from octavo.ipc.stderr import hold_standard_streams, settle_standard_error
from octavo.ipc.subprocesses import describe_exit, spawn
from octavo.messages import EngineGone, EngineLost, EngineReport
from octavo.observe import logs
from octavo.observe.history import history_memory
from octavo.recording.crash_files import CrashFiles
from octavo.supervisor.acceptor import Acceptor, raise_descriptor_limit
from octavo.supervisor.api_processes import ApiProcess, ApiProcesses
from octavo.supervisor.listen import (
    access_note,
    cannot_listen,
    check_certificates,
    listen,
    pages_line,
    remove_socket,
    url_of,
)
from octavo.supervisor.memory_report import budget_lines
from octavo.supervisor.runtime_dir import RuntimeDir, ServerRecord, files_folder, remove_abandoned, write_record
from octavo.supervisor.watchdog import LOOK_SECONDS, Restarts, Watch, for_clients
from octavo.weights.sources.source import ModelSource, resolve

log = logging.getLogger("octavo.supervisor")

BACKLOG = 2048
ENGINE_MODULE = "octavo.engine.process"  # benchmarks.front replaces it by the same process without a model


class _Signals:
    """Turns SIGTERM and SIGINT into bytes on a socket, so that the supervisor handles them between two events."""

    def __enter__(self) -> socket.socket:
        reader, self._writer = socket.socketpair()
        for end in (reader, self._writer):
            end.setblocking(False)
        self._before = [signal.signal(number, _leave_to_wakeup) for number in (signal.SIGTERM, signal.SIGINT)]
        signal.set_wakeup_fd(self._writer.fileno())
        self._reader = reader
        return reader

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), self._before, strict=True):
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()


def serve(config: Config) -> int:
    """Serve until a signal or a fatal failure. Returns the exit code: 0 stopped in order, 1 a process ended and was not
    restarted, 2 a start-up error, 3 stopped in order but some requests were cut off, 130 stopped at once."""
    started = time.monotonic()
    hold_standard_streams()
    logs.install(logging.WARNING, config.server.log_format)
    log.setLevel(logging.INFO)
    raise_descriptor_limit()
    check_certificates(config.server)
    _check_parsers(config.server)
    listener = listen(config.server.host, config.server.port, config.server.uds)
    try:
        return _serve(config, listener, started)
    finally:
        remove_socket(listener)
        settle_standard_error()


def _serve(config: Config, listener: socket.socket, started: float) -> int:
    source = resolve(
        config.model.model,
        config.model.revision,
        allow_missing_weights=config.model.load_format == "dummy",
        download_dir=config.model.download_dir,
    )
    remove_abandoned()
    folder = RuntimeDir()
    acceptor = Acceptor(listener)
    try:
        with (
            files_folder(config, folder.path) as config,
            _Signals() as signals,
            _Supervisor(config, source, listener, acceptor, folder.path) as supervisor,
        ):
            return supervisor.run(signals, started)
    finally:
        remove_socket(listener)  # before it is closed: its name is known only until then
        acceptor.close()
        folder.close()


class _Supervisor:
    """The supervisor's event loop: one thread, woken by its processes' output or end, by signals, and every half second to check
    on them."""

    def __init__(
        self, config: Config, source: ModelSource, listener: socket.socket, acceptor: Acceptor, folder: Path
    ) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._listener, self._acceptor = listener, acceptor
        self._served_name = config.model.name_of(source.name)
        self._num_servers = config.server.num_api_processes(usable_cores())
        self._engine: subprocess.Popen[bytes] | None = None
        self._num_engines = 0
        self._engine_started = 0.0
        self._is_engine_ready = False
        self._engine_ready_at = 0.0
        self._was_engine_ready = False  # the current engine or an earlier one
        self._has_served = False
        self._restarts = Restarts(config.server.max_engine_restarts)
        self._restart_at: float | None = None
        self._kill_reason = ""  # why we killed the engine; empty: we did not
        self._drain_until: float | None = None  # None: not draining
        self._close_until: float | None = None  # None: the engine has not been asked to stop
        self._exit_code: int | None = None  # None: not stopping
        self._is_over = False
        self._heartbeat_fd = shared_memory()
        self._heartbeat = Heartbeat(self._heartbeat_fd)
        self._history_fd = history_memory()
        self._watch = Watch(self._heartbeat, config.server.step_timeout)
        self._crash_files = CrashFiles(config.recorder)
        self._selector = selectors.DefaultSelector()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        template = ApiLaunch(
            config,
            -1,
            -1,
            "",
            "",
            str(source.path),
            self._served_name,
            dict(source.default_sampling),
            heartbeat_fd=self._heartbeat_fd,
            num_servers=self._num_servers,
        )
        self._api_processes = ApiProcesses(
            self._num_servers, template, acceptor, folder, self._context, self._heartbeat
        )

    def __enter__(self) -> "_Supervisor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill and reap every process, and release the shared memory and the recordings."""
        for process in self._all():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._context.destroy(linger=0)
        self._selector.close()
        self._heartbeat.close()
        os.close(self._heartbeat_fd)
        os.close(self._history_fd)
        self._crash_files.close(self._num_engines)

    def run(self, signals: socket.socket, started: float) -> int:
        self._started = started
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(len(signals.recv(64))))
        self._start_engine()
        for slot in self._api_processes.slots:
            self._start_server(slot)
        drop_library_pages()  # while the engine loads
        while not self._is_over:
            for key, _ in self._selector.select(LOOK_SECONDS):
                key.data()
            self._look()
        assert self._exit_code is not None
        if self._exit_code in (0, 3):
            self._say("stopped" if self._exit_code == 0 else "stopped; some requests were cut off")
        return self._exit_code

    # ── starting ──

    def _start_engine(self) -> None:
        self._num_engines += 1
        self._restart_at = None
        self._is_engine_ready = False
        self._engine_started = time.monotonic()
        launch = EngineLaunch(
            without_keys(self._config),
            str(self._source.path),
            self._source.kind,
            self._source.name,
            self._served_name,
            self._engine_address(),
            self._num_servers,
            self._heartbeat_fd,
            self._num_engines,
            str(self._crash_files.live_folder or ""),
            ring_fd=next(iter(self._crash_files.ring_fds), -1),
            history_fd=self._history_fd,
        )
        inherited = (self._heartbeat_fd, self._history_fd, *self._crash_files.ring_fds)
        self._engine = spawn(ENGINE_MODULE, launch, pass_fds=inherited)
        self._listen_to(self._engine, self._on_engine_output)

    def _start_server(self, slot: ApiProcess) -> None:
        server = self._api_processes.start(slot, self._engine_address(), self._num_engines)
        self._listen_to(server, partial(self._on_server_output, slot))

    def _listen_to(self, process: subprocess.Popen[bytes], on_output: Callable[[], None]) -> None:
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, on_output)

    # ── what happens ──

    def _on_engine_output(self) -> None:
        """Handle the engine's standard output: one line, its report, when it is ready; then its end."""
        assert self._engine is not None and self._engine.stdout is not None
        line = self._engine.stdout.readline()
        if not line:
            self._selector.unregister(self._engine.stdout)
            return self._engine_ended(self._engine.wait())
        self._is_engine_ready, self._engine_ready_at = True, time.monotonic()
        if self._was_engine_ready:
            self._say(f"the engine is back after {time.monotonic() - self._engine_started:.1f} s")
            return
        self._was_engine_ready = True
        # Not earlier: until the engine is ready, connections are refused at once. Not later: if the port was taken since it
        # was bound, this is where we find out.
        try:
            self._acceptor.open(BACKLOG)
        except OSError as error:
            raise cannot_listen(self._config.server.host, self._config.server.port, error) from None
        self._say(f"model {self._served_name} from {self._source.path}")
        for text in budget_lines(msgspec.json.decode(line, type=EngineReport)):
            self._say(text)
        self._say(f"API processes: {self._num_servers} (--api-processes {self._config.server.api_processes})")
        self._say(self._crash_files.status_line)
        if note := access_note(self._config.server):
            log.warning("%s", note)
        self._say_if_ready()

    def _on_server_output(self, slot: ApiProcess) -> None:
        assert slot.process is not None and slot.process.stdout is not None
        if slot.process.stdout.readline():
            self._api_processes.mark_ready(slot)
            if self._has_served:
                self._say(f"API process {slot.origin} is back after {time.monotonic() - slot.started:.1f} s")
            return self._say_if_ready()
        self._selector.unregister(slot.process.stdout)
        code = slot.process.wait()
        if self._exit_code is None:
            self._server_ended(slot, code)
        elif self._exit_code == 0 and code and slot.is_ready:  # one that was still starting had no requests
            self._exit_code = 3
        if self._exit_code is not None and self._api_processes.has_ended:
            self._close_engine()

    def _server_ended(self, slot: ApiProcess, code: int) -> None:
        """Restart an API process that ended on its own, or stop the server. Its connections have closed with it; the other API
        processes keep serving."""
        if code == 2 and not self._has_served:  # a start-up error, which it has logged
            self._exit_code, self._is_over = 2, True
            return
        message = slot.kill_reason or f"API process {slot.origin} ended unexpectedly ({describe_exit(code)})"
        delay = slot.restarts.delay(time.monotonic(), slot.is_ready) if self._has_served else None
        if delay is None:
            why = f"; it is not restarted: {slot.restarts.why_not}" if self._has_served else ""
            self._say_error(message + why)
            return self._drain(1)
        self._say_error(f"{message}: its connections are closed; starting another")
        cause = "start" if not slot.is_ready else "hung" if slot.kill_reason else "killed" if code < 0 else "failed"
        self._heartbeat.count_restart("api", cause)
        if self._engine is not None and self._engine.poll() is None:
            self._api_processes.announce_end(slot, self._engine_address(), self._num_engines)
        slot.is_ready = False
        slot.restart_at = time.monotonic() + delay

    def _engine_ended(self, code: int) -> None:
        if self._close_until is not None:
            self._is_over = True
            return
        if not self._was_engine_ready and code == 2:  # a start-up error, which it has logged
            self._exit_code, self._is_over = 2, True
            return
        message = self._kill_reason or f"the engine ended unexpectedly ({describe_exit(code)})"
        cause = (
            "start"
            if not self._is_engine_ready
            else "hung"
            if self._kill_reason
            else "killed"
            if code < 0
            else "failed"
        )
        self._kill_reason = ""
        self._say_error(message)
        self._crash_files.seal_in_background(self._num_engines)
        delay = self._restarts.delay(time.monotonic(), self._is_engine_ready) if self._was_engine_ready else None
        if delay is None:
            why = f"; it is not restarted: {self._restarts.why_not}" if self._was_engine_ready else ""
            self._api_processes.send_all(EngineGone(for_clients(message) + why))
            return self._drain(1)
        self._heartbeat.count_restart("engine", cause)
        # A start that failed computed nothing, so no request can be its cause.
        seated = self._heartbeat.seated() if self._is_engine_ready else []
        self._api_processes.send_all(EngineLost(for_clients(message), seated))
        self._is_engine_ready = False
        self._restart_at = time.monotonic() + delay
        self._say("starting another engine; requests wait for it")

    def _look(self) -> None:
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at and self._close_until is None:
            self._start_engine()
            self._api_processes.announce_engine(self._engine_address(), self._num_engines)
        if self._exit_code is None:
            for slot in self._api_processes.due(now):
                self._start_server(slot)
            self._api_processes.look(self._engine_ready_at if self._is_engine_ready else None)
        if not self._is_engine_ready and self._engine is not None and self._loads_too_long(now):
            self._engine.kill()
        if self._is_engine_ready and self._engine is not None and (problem := self._watch.look()) is not None:
            self._kill_reason = f"the engine hangs and is killed: {problem}"
            self._engine.kill()
        if self._drain_until is not None and now >= self._drain_until:
            self._drain_until = None
            self._api_processes.kill()
        if self._close_until is not None and now >= self._close_until:
            self._is_over = True  # __exit__ kills the processes that are left

    def _loads_too_long(self, now: float) -> bool:
        limit = self._config.server.start_timeout
        if self._kill_reason or not limit or self._restart_at is not None or now - self._engine_started < limit:
            return False
        self._kill_reason = f"the engine was not ready within {limit:g} s (--start-timeout) and is killed"
        return True

    # ── stopping ──

    def _on_signals(self, num_signals: int) -> None:
        if self._exit_code is not None or num_signals > 1:
            self._say("stopped at once; running requests were cut off")
            self._exit_code, self._is_over = 130, True
            return
        if self._has_served:
            timeout = self._config.server.shutdown_timeout
            self._say(f"stopping: running requests get up to {timeout:g} s; a second Ctrl-C or SIGTERM stops at once")
        self._drain(0)

    def _drain(self, exit_code: int) -> None:
        """Stop the API processes, which refuse new requests and finish the running ones; then the engine."""
        if self._exit_code is None:
            self._exit_code = exit_code
            self._api_processes.terminate()
            self._drain_until = time.monotonic() + self._config.server.shutdown_timeout + 3
        if self._api_processes.has_ended:
            self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is None or self._engine.poll() is not None:
            self._is_over = True
        elif self._close_until is None:
            self._close_until = time.monotonic() + 5
            assert self._engine.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._engine.stdin.close()

    # ── logging ──

    def _say_if_ready(self) -> None:
        if not self._has_served and self._is_engine_ready and self._api_processes.num_ready == self._num_servers:
            self._has_served = True
            url = url_of(self._listener, self._config.server)
            write_record(self._folder, ServerRecord(os.getpid(), url, self._served_name, time.time()))
            self._say(f"ready after {time.monotonic() - self._started:.1f} s: {url}")
            if url.startswith("http"):  # no browser opens a Unix socket
                self._say(pages_line(url))

    def _say(self, line: str) -> None:
        log.info("%s", line)

    def _say_error(self, message: str) -> None:
        log.error("%s", message)

    def _engine_address(self) -> str:
        return f"ipc://{self._folder}/engine-{self._num_engines}"

    def _all(self) -> list[subprocess.Popen[bytes]]:
        return ([self._engine] if self._engine is not None else []) + self._api_processes.processes


def _check_parsers(server: ServerConfig) -> None:
    """Raise ConfigError for unknown parser names, before a model is loaded."""
    names = (server.tool_call_parser, server.reasoning_parser)
    if names != (AUTO, AUTO):
        from octavo.text.formats import check_parsers  # not at start: it imports the template engine

        check_parsers(*names)


def _leave_to_wakeup(number: int, frame: object) -> None:
    """Do nothing: the byte that the interpreter writes to the wake-up descriptor is enough."""
