"""The supervisor of `octavo serve`: starts the API processes and the engine, restarts them when they end, stops them in order."""

import contextlib
import importlib
import logging
import os
import selectors
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from octavo.config import AUTO, MAX_REPLICAS, Config, ServerConfig, read_tiers, replace, without_keys
from octavo.errors import ConfigError
from octavo.ipc.cores import usable_cores
from octavo.ipc.heartbeat import Heartbeat, shared_memory
from octavo.ipc.launch import ApiLaunch, EngineLaunch, FleetMember
from octavo.ipc.memory_trim import drop_library_pages
from octavo.ipc.stderr import hold_standard_streams, settle_standard_error
from octavo.ipc.subprocesses import KILLED_SECONDS, describe_exit, reap_killed
from octavo.kv_tier.folder import folder_secret
from octavo.messages import (
    EngineGone,
    EngineLost,
    EngineReport,
    FleetChanged,
    FleetState,
    ReplicaDrains,
    ReplicaIdle,
    ReplicaJoined,
    ScaleFleet,
    ServerReady,
    ToSupervisor,
)
from octavo.observe import logs
from octavo.supervisor.acceptor import Acceptor, raise_descriptor_limit
from octavo.supervisor.api_processes import ApiProcess, ApiProcesses, EngineAddress
from octavo.supervisor.autoscale import Autoscale
from octavo.supervisor.fewer_replicas import Standing, next_to_restart, numbers_to_stop
from octavo.supervisor.launcher import Launcher, LocalLauncher
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
from octavo.supervisor.replica import Replica
from octavo.supervisor.runtime_dir import RuntimeDir, ServerRecord, files_folder, remove_abandoned, write_record
from octavo.supervisor.watchdog import LOOK_SECONDS, CommonRequests, for_clients
from octavo.text.tokenize.made_up import made_up_tokenizer
from octavo.weights.sources.source import ModelSource, resolve

log = logging.getLogger("octavo.supervisor")

BACKLOG = 2048
STOP_SECONDS = 5.0  # that a drained engine has to end
RAY_LAUNCHER = "octavo.cluster.launcher:RayLauncher"
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


def serve(config: Config, *, is_inner: bool = False) -> int:
    """Serve until a signal or a fatal failure. Returns the exit code: 0 stopped in order, 1 a process ended and was not
    restarted, 2 a start-up error, 3 stopped in order but some requests were cut off, 130 stopped at once. `is_inner`: it is one
    model of a gateway, which `octavo ps` lists in its place."""
    started = time.monotonic()
    hold_standard_streams()
    logs.install(logging.WARNING, config.server.log_format)
    log.setLevel(logging.INFO)
    raise_descriptor_limit()
    check_certificates(config.server)
    _check_parsers(config.server)
    listener = listen(config.server.host, config.server.port, config.server.uds)
    try:
        return _serve(config, listener, started, is_inner)
    finally:
        remove_socket(listener)
        settle_standard_error()


def find_model(config: Config) -> ModelSource:
    """Find the model's files, or download them. Raises ConfigError."""
    return resolve(
        config.model.model,
        config.model.revision,
        allow_missing_weights=config.model.load_format == "dummy",
        download_dir=config.model.download_dir,
    )


def _serve(config: Config, listener: socket.socket, started: float, is_inner: bool) -> int:
    source = find_model(config)
    remove_abandoned()
    folder = RuntimeDir()
    acceptor = Acceptor(listener)
    try:
        config = _with_tokenizer(config, source.path, folder.path / "tokenizer")
        with (
            files_folder(config, folder.path) as config,
            contextlib.closing(_launcher(config, folder.path)) as launcher,
            _Signals() as signals,
            _Supervisor(config, source, listener, acceptor, folder.path, launcher, is_inner) as supervisor,
        ):
            return supervisor.run(signals, started)
    finally:
        remove_socket(listener)  # before it is closed: its name is known only until then
        acceptor.close()
        folder.close()


def _with_tokenizer(config: Config, model: Path, folder: Path) -> Config:
    """With --load-format dummy a folder may be nothing but a configuration: it gets a tokenizer that is made up."""
    if config.model.load_format != "dummy" or config.model.tokenizer:
        return config
    made_up = made_up_tokenizer(model, folder)
    if not made_up:
        return config
    log.warning(
        "%s has no tokenizer: words are made up, one for each token id, and text means nothing to the model", model
    )
    return replace(config, tokenizer=made_up)


def _launcher(config: Config, folder: Path) -> Launcher:
    """How engines are started. Ray's is loaded only if it is asked for."""
    if not config.parallel.uses_ray:
        return LocalLauncher()
    module, _, name = RAY_LAUNCHER.partition(":")
    launcher: Launcher = getattr(importlib.import_module(module), name)(config, folder)
    return launcher


class _Supervisor:
    """The supervisor's event loop: one thread, woken by its processes' output or end, by signals, and every half second to check
    on them."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        listener: socket.socket,
        acceptor: Acceptor,
        folder: Path,
        launcher: Launcher,
        is_inner: bool,
    ) -> None:
        self._is_inner = is_inner
        self._config, self._source, self._folder = config, source, folder
        self._listener, self._acceptor = listener, acceptor
        self._served_name = config.model.name_of(source.name)
        self._num_servers = config.server.num_api_processes(usable_cores())
        self._is_fleet = config.fleet.is_fleet
        self._secret = _fleet_secret(config)
        self._launcher = launcher
        self._num_engines = 0
        self._has_served = False
        self._drain_until: float | None = None  # None: not draining
        self._killed_at: float | None = (
            None  # when API processes that did not stop in time were killed; None: they were not
        )
        self._close_until: float | None = None  # None: the engines have not been asked to stop
        self._exit_code: int | None = None  # None: not stopping
        self._is_over = False
        self._heartbeat_fd = shared_memory(MAX_REPLICAS if self._is_fleet else 1)
        self._heartbeat = Heartbeat(self._heartbeat_fd)  # the first replica's block has the words of the server, too
        self._common = CommonRequests()
        self._selector = selectors.DefaultSelector()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replicas: dict[int, Replica] = {}
        self._announced: FleetState | None = None
        self._target = config.fleet.first_replicas
        self._to_restart: list[int] = []  # replicas that are to be started again, one after the other
        self._note = ""  # about the fleet, for people
        self._autoscale: Autoscale | None = None
        if config.fleet.max_replicas:
            limits = (config.fleet.least_replicas, config.fleet.max_replicas)
            self._autoscale = Autoscale(*limits, config.fleet.saturation_seconds)
        for number in range(self._target):
            self._add_replica(number)
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
            fleet_secret=self._secret if self._is_fleet else b"",
            recording="" if self._is_fleet else str(self._replicas[0].crash_files.live_folder or ""),
        )
        self._api_processes = ApiProcesses(
            self._num_servers, template, acceptor, folder, self._context, self._heartbeat
        )

    def __enter__(self) -> "_Supervisor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill and reap every process, and release the shared memory and the recordings."""
        engines = [(each, each.engine) for each in self._replicas.values() if each.engine is not None and each.runs]
        self._api_processes.kill()
        for _, engine in engines:
            engine.kill()
        killed_at = time.monotonic()
        for process in self._api_processes.processes:
            if not reap_killed(process, killed_at):
                self._say_left_behind("an API process", process.pid)
        for replica, engine in engines:
            engine.wait()
            if engine.is_left_behind:
                self._say_left_behind(self._name(replica), engine.pid)
        self._context.destroy(linger=0)
        self._selector.close()
        for replica in self._replicas.values():
            replica.close()
        self._heartbeat.close()
        os.close(self._heartbeat_fd)

    def run(self, signals: socket.socket, started: float) -> int:
        self._started = started
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(len(signals.recv(64))))
        if self._launcher.words:
            self._say(self._launcher.words)
        for replica in self._replicas.values():
            self._start_engine(replica)
        for slot in self._api_processes.slots:
            self._start_server(slot)
        drop_library_pages()  # while the engines load
        while not self._is_over:
            for key, _ in self._selector.select(LOOK_SECONDS):
                key.data()
            self._look()
            self._announce_fleet()
        assert self._exit_code is not None
        if self._exit_code in (0, 3):
            self._say("stopped" if self._exit_code == 0 else "stopped; some requests were cut off")
        return self._exit_code

    # ── starting ──

    def _add_replica(self, number: int) -> Replica:
        share = None
        if self._is_fleet:
            most = self._config.fleet.max_replicas or self._config.fleet.first_replicas
            share = self._launcher.share(self._config, number, most)
        recording = self._launcher.recording(self._config)
        replica = self._replicas[number] = Replica(number, recording, self._heartbeat_fd, share)
        return replica

    def _start_engine(self, replica: Replica) -> None:
        self._num_engines += 1
        epoch, share = self._num_engines, replica.share
        member = None
        if share is not None:
            member = FleetMember(replica.number, self._secret, share.cores)
        ring_fds = replica.crash_files.ring_fds
        launch = EngineLaunch(
            without_keys(self._config if share is None else share.config),
            str(self._source.path),
            self._source.kind,
            self._source.name,
            self._served_name,
            self._address_of(epoch),
            self._num_servers,
            self._heartbeat_fd,
            epoch,
            str(replica.crash_files.live_folder or ""),
            ring_fd=next(iter(ring_fds), -1),
            history_fd=replica.history_fd,
            member=member,
        )
        inherited = (self._heartbeat_fd, replica.history_fd, *ring_fds)
        environment = {} if share is None else share.environment
        engine = self._launcher.start(ENGINE_MODULE, launch, inherited, environment)
        replica.begin(engine, epoch)
        self._selector.register(engine.fileno(), selectors.EVENT_READ, partial(self._on_engine_output, replica))

    def _start_server(self, slot: ApiProcess) -> None:
        engines = [
            EngineAddress(each.number, each.epoch, self._address_of(each.epoch), each.restart_at is not None)
            for each in self._replicas.values()
            if not (each.has_failed or each.after_drain)
        ]
        server = self._api_processes.start(slot, engines, self._is_fleet)
        assert server.stdout is not None
        self._selector.register(server.stdout, selectors.EVENT_READ, partial(self._on_server_output, slot))
        self._announced = None  # it wants to know the fleet

    # ── what happens ──

    def _on_engine_output(self, replica: Replica) -> None:
        """Handle an engine's standard output: one line, its report, when it is ready; then its end."""
        assert replica.engine is not None
        lines = replica.engine.read_lines()
        if lines is None:
            self._selector.unregister(replica.engine.fileno())
            return self._engine_ended(replica, replica.engine.wait())
        for line in lines:
            self._engine_ready(replica, msgspec.json.decode(line, type=EngineReport))
        return None

    def _engine_ready(self, replica: Replica, report: EngineReport) -> None:
        was_ready = replica.was_ready
        replica.is_ready = replica.was_ready = True
        replica.ready_at = time.monotonic()
        seconds = replica.ready_at - replica.started
        if was_ready:
            return self._say(f"{self._name(replica)} is back after {seconds:.1f} s")
        if self._has_served or any(not each.was_ready for each in self._replicas.values()):
            return self._say(f"replica {replica.number} is ready after {seconds:.1f} s")
        # Not earlier: until all engines are ready, connections are refused at once. Not later: if the port was taken since it
        # was bound, this is where we find out.
        try:
            self._acceptor.open(BACKLOG)
        except OSError as error:
            raise cannot_listen(self._config.server.host, self._config.server.port, error) from None
        self._say(f"model {self._served_name} from {self._source.path}")
        if self._source.note:
            self._say(self._source.note)
        if self._is_fleet:
            self._say(f"replicas: {len(self._replicas)} (--data-parallel-size), each as follows")
            for each in self._replicas.values():
                self._say(f"replica {each.number}: {each.state.place}")
        for text in budget_lines(report):
            self._say(text)
        self._say(f"API processes: {self._num_servers} (--api-processes {self._config.server.api_processes})")
        if self._launcher.is_remote:
            self._say("recorder: on the nodes of the replicas")
            if (disk := read_tiers(self._config.cache.kv_tier).disk) is not None:
                self._say(
                    f"every node keeps its own prefixes in {disk.folder}: a replica that starts on another node finds those of that node"
                )
        else:
            self._say(replica.crash_files.status_line)
        if note := access_note(self._config.server):
            log.warning("%s", note)
        return self._say_if_ready()

    def _on_server_output(self, slot: ApiProcess) -> None:
        assert slot.process is not None and slot.process.stdout is not None and slot.output is not None
        lines = slot.output.read()
        if lines is not None:
            for line in lines:
                self._on_server_line(slot, line)
            return
        self._selector.unregister(slot.process.stdout)
        code = slot.process.wait()
        if self._exit_code is None:
            self._server_ended(slot, code)
        elif self._exit_code == 0 and code and slot.is_ready:  # one that was still starting had no requests
            self._exit_code = 3
        if self._exit_code is not None and self._api_processes.has_ended:
            self._close_engines()

    def _on_server_line(self, slot: ApiProcess, line: bytes) -> None:
        match msgspec.json.decode(line, type=ToSupervisor):
            case ServerReady():
                self._api_processes.mark_ready(slot)
                if self._has_served:
                    self._say(f"API process {slot.origin} is back after {time.monotonic() - slot.started:.1f} s")
                self._say_if_ready()
            case ReplicaIdle() as idle:
                replica = self._replicas.get(idle.replica)
                if replica is not None and replica.epoch == idle.epoch:
                    replica.busy_origins.discard(slot.origin)
            case ReplicaJoined() as joined:
                replica = self._replicas.get(joined.replica)
                if replica is not None and replica.epoch == joined.epoch:
                    replica.joined_origins.add(slot.origin)
            case ScaleFleet() as asked:
                self._scale(asked)

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
        for replica in self._replicas.values():
            replica.busy_origins.discard(slot.origin)
            replica.joined_origins.discard(slot.origin)
            if replica.runs:
                address = EngineAddress(replica.number, replica.epoch, self._address_of(replica.epoch))
                self._api_processes.announce_end(slot, address)
        slot.is_ready = False
        slot.restart_at = time.monotonic() + delay

    def _engine_ended(self, replica: Replica, code: int) -> None:
        if self._close_until is not None:
            self._is_over = not any(each.runs for each in self._replicas.values())
            return
        if not replica.was_ready and not self._has_served and code == 2:  # a start-up error, which it has logged
            self._exit_code, self._is_over = 2, True
            return
        if replica.is_stopping:
            return self._drained(replica)
        name = self._name(replica)
        assert replica.engine is not None
        message = replica.kill_reason or f"{name} ended unexpectedly ({replica.engine.describe(code)})"
        cause = (
            "start" if not replica.is_ready else "hung" if replica.kill_reason else "killed" if code < 0 else "failed"
        )
        replica.kill_reason = ""
        self._say_error(message)
        replica.crash_files.seal_in_background(replica.epoch)
        now = time.monotonic()
        delay = replica.restarts.delay(now, replica.is_ready) if replica.was_ready else None
        if delay is None:
            why = f"; it is not restarted: {replica.restarts.why_not}" if replica.was_ready else ""
            return self._give_up(replica, message, why)
        replica.heartbeat.count_restart("engine", cause)
        # A start that failed computed nothing, so no request can be its cause.
        seated = replica.heartbeat.seated() if replica.is_ready else []
        suspects = self._common.note(seated, now)
        self._api_processes.send_all(EngineLost(for_clients(message), seated, replica.number, suspects))
        replica.is_ready = False
        if replica.after_drain == "stop":  # it was to be removed anyway
            return self._remove(replica)
        replica.num_restarts += 1
        replica.after_drain, replica.restart_at = "", now + delay
        if any(each.is_ready for each in self._replicas.values()):
            self._say(f"starting {name} again; its requests go on at other replicas")
        else:
            self._say("starting another engine; requests wait for it")
        return None

    def _give_up(self, replica: Replica, message: str, why: str) -> None:
        """Do not start a replica's engine again. The server stops with its last replica, or with one that has never been ready at its start."""
        replica.has_failed, replica.is_ready, replica.restart_at = True, False, None
        replica.after_drain = ""
        num_left = sum(not each.has_failed for each in self._replicas.values())
        self._note = f"replica {replica.number} has failed{why}"
        if self._to_restart:  # the others would fail alike, and the last of them would end the server
            self._to_restart.clear()
            self._note += "; the rolling restart has ended, and the replicas that were to follow serve on as they are"
        self._target = max(1, min(self._target, num_left))  # another one would fail alike
        self._api_processes.send_all(EngineGone(for_clients(message) + why, replica.number))
        if self._has_served and not all(each.has_failed for each in self._replicas.values()):
            self._say_error(f"{self._name(replica)} is given up{why}; the others serve on")
            return
        self._drain(1)

    def _look(self) -> None:
        now = time.monotonic()
        if self._close_until is None:
            for replica in [*self._replicas.values()]:
                self._look_at(replica, now)
            if self._is_fleet and self._has_served and self._exit_code is None:
                self._steer_fleet(now)
        if self._exit_code is None:
            for slot in self._api_processes.due(now):
                self._start_server(slot)
            ready = [each.ready_at for each in self._replicas.values() if each.is_ready]
            self._api_processes.look(min(ready, default=None))
        if self._drain_until is not None and now >= self._drain_until:
            self._drain_until, self._killed_at = None, now
            self._api_processes.kill()
        if self._killed_at is not None and now - self._killed_at >= KILLED_SECONDS and self._close_until is None:
            self._exit_code = self._exit_code or 3
            self._close_engines()  # an API process does not end; __exit__ leaves it behind
        if self._close_until is not None and now >= self._close_until:
            self._is_over = True  # __exit__ kills the processes that are left

    def _look_at(self, replica: Replica, now: float) -> None:
        """Start a replica's engine if it is due, and kill one that hangs."""
        if replica.restart_at is not None:
            if now >= replica.restart_at:
                self._start_engine(replica)
                address = EngineAddress(replica.number, replica.epoch, self._address_of(replica.epoch))
                self._api_processes.announce_engine(address)
            return
        if replica.engine is None or replica.has_failed:
            return
        if replica.engine.give_up_if_unkillable():
            self._selector.unregister(replica.engine.fileno())
            self._say_left_behind(self._name(replica), replica.engine.pid)
            return self._engine_ended(replica, -signal.SIGKILL)
        if replica.kill_reason:
            return
        if not replica.is_ready:
            limit = 0.0 if replica.engine.is_waiting else self._config.server.start_timeout
            if limit and now - max(replica.started, replica.engine.placed) >= limit:
                replica.kill_reason = (
                    f"{self._name(replica)} was not ready within {limit:g} s (--start-timeout) and is killed"
                )
                replica.engine.kill()
            return
        if (problem := replica.watch.look()) is not None:
            replica.kill_reason = f"{self._name(replica)} hangs and is killed: {problem}"
        elif (problem := replica.pulse.look()) is not None and self._has_others(replica):
            replica.kill_reason = f"{self._name(replica)} is taken for dead and killed: {problem}"
        if replica.kill_reason:
            replica.engine.kill()

    def _has_others(self, replica: Replica) -> bool:
        return any(each.is_ready and each is not replica for each in self._replicas.values())

    # ── the fleet ──

    def _scale(self, asked: ScaleFleet) -> None:
        """A client's wish. It was checked in its API process."""
        if asked.replicas and asked.replicas != self._target:
            self._say(f"scaling from {self._target} to {asked.replicas} replicas")
            self._target, self._note = asked.replicas, ""
        if asked.restart:
            self._source = self._resolve()
            self._to_restart, self._note = [each.number for each in self._live()], ""
            self._say(f"starting {len(self._to_restart)} replicas again, one after the other")

    def _resolve(self) -> ModelSource:
        """Find the model's files again: there may be new ones. What cannot be found stays as it was."""
        try:
            return find_model(self._config)
        except ConfigError as error:
            self._say_error(f"the model's files cannot be found again, the known ones are used: {error.message}")
            return self._source

    def _live(self) -> list[Replica]:
        """Replicas that are there, or will be soon, and are not to be removed."""
        return [each for each in self._replicas.values() if not each.has_failed and each.after_drain != "stop"]

    def _takes_requests(self, replica: Replica) -> bool:
        """Whether a replica is ready and every API process sends it requests. An engine that says that it is ready gets none before they
        have heard so, too."""
        return replica.status == "ready" and self._api_processes.origins <= replica.joined_origins

    def _steer_fleet(self, now: float) -> None:
        """Add and drain replicas until there are as many as wanted, and go on with a rolling restart."""
        if self._autoscale is not None:
            backlogs = [each.heartbeat.backlog_seconds for each in self._live() if each.status == "ready"]
            target = self._autoscale.target(now, self._target, backlogs)
            if target != self._target:
                self._say(f"replicas: {self._target} → {target}, because {sum(backlogs):.1f} s of work wait")
                self._target = target
        live = self._live()
        self._to_restart = [number for number in self._to_restart if any(each.number == number for each in live)]
        standings = [Standing(each.number, each.status == "ready", self._takes_requests(each)) for each in live]
        for number in numbers_to_stop(standings, self._target, self._to_restart):
            self._drain_replica(self._replicas[number], "stop")
        free = (
            number
            for number in range(MAX_REPLICAS)
            if number not in self._replicas or self._replicas[number].has_failed
        )
        for _ in range(self._target - len(live)):
            self._start_replica(next(free))
        following = next_to_restart(standings, self._target, self._to_restart)
        if following is not None and all(self._takes_requests(each) for each in self._live()):
            self._to_restart.remove(following)
            self._drain_replica(self._replicas[following], "restart")
        for replica in [*self._replicas.values()]:
            if (
                replica.after_drain
                and not replica.busy_origins
                and replica.engine is not None
                and not replica.is_stopping
            ):
                replica.is_stopping, replica.stop_until = True, now + STOP_SECONDS
                replica.engine.stop()
            elif replica.is_stopping and now >= replica.stop_until and replica.engine is not None:
                replica.engine.kill()

    def _start_replica(self, number: int) -> None:
        if number in self._replicas:  # it has failed
            self._replicas.pop(number).close()
        replica = self._add_replica(number)
        self._start_engine(replica)
        self._say(f"starting replica {number}: {replica.state.place}")
        self._api_processes.announce_engine(EngineAddress(number, replica.epoch, self._address_of(replica.epoch)))

    def _drain_replica(self, replica: Replica, after: Literal["stop", "restart"]) -> None:
        """Give a replica no more requests. When those that are there have finished or moved, its engine is stopped."""
        replica.after_drain = after
        replica.busy_origins = self._api_processes.origins if replica.is_ready else set()
        seconds = self._config.server.shutdown_timeout
        self._say(f"draining replica {replica.number}: its requests get up to {seconds:g} s, then they go on at others")
        self._api_processes.send_all(ReplicaDrains(replica.number, replica.epoch, seconds))

    def _drained(self, replica: Replica) -> None:
        """A drained replica's engine has ended."""
        replica.is_ready = False
        if replica.after_drain == "stop":
            return self._remove(replica)
        self._start_engine(replica)
        self._api_processes.announce_engine(
            EngineAddress(replica.number, replica.epoch, self._address_of(replica.epoch))
        )
        return None

    def _remove(self, replica: Replica) -> None:
        self._api_processes.send_all(EngineGone(f"replica {replica.number} was removed", replica.number))
        replica.close()
        del self._replicas[replica.number]
        self._say(f"replica {replica.number} is removed; {len(self._live())} are left")

    def _announce_fleet(self) -> None:
        """Send API processes the state of the replicas if it has changed."""
        if self._is_fleet:
            note = self._note
            if self._to_restart:
                note = f"rolling restart: {len(self._to_restart)} replicas are to follow"
            state = FleetState([each.state for each in self._replicas.values()], self._target, note)
            if state != self._announced:
                self._announced = state
                self._api_processes.send_all(FleetChanged(state))

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
        """Stop the API processes, which refuse new requests and finish the running ones; then the engines."""
        if self._exit_code is None:
            self._exit_code = exit_code
            self._api_processes.terminate()
            self._drain_until = time.monotonic() + self._config.server.shutdown_timeout + 3
        if self._api_processes.has_ended:
            self._close_engines()

    def _close_engines(self) -> None:
        running = [each.engine for each in self._replicas.values() if each.engine is not None and each.runs]
        if not running:
            self._is_over = True
        elif self._close_until is None:
            self._close_until = time.monotonic() + 5
            for engine in running:
                engine.stop()

    # ── logging ──

    def _say_if_ready(self) -> None:
        are_ready = all(each.was_ready for each in self._replicas.values())
        if not self._has_served and are_ready and self._api_processes.num_ready == self._num_servers:
            self._has_served = True
            url = url_of(self._listener, self._config.server)
            record = ServerRecord(os.getpid(), url, self._served_name, time.time(), self._is_inner)
            write_record(self._folder, record)
            self._say(f"ready after {time.monotonic() - self._started:.1f} s: {url}")
            if url.startswith("http"):  # no browser opens a Unix socket
                self._say(pages_line(url))

    def _say(self, line: str) -> None:
        log.info("%s", line)

    def _say_error(self, message: str) -> None:
        log.error("%s", message)

    def _say_left_behind(self, name: str, pid: int) -> None:
        self._say_error(
            f"{name} (process {pid}) was killed and does not end: it waits for the system, most likely for a disk that does not "
            "answer. It is left behind, with the memory that it has"
        )

    def _name(self, replica: Replica) -> str:
        return f"replica {replica.number}" if self._is_fleet else "the engine"

    def _address_of(self, epoch: int) -> str:
        return f"ipc://{self._folder}/engine-{epoch}"


def _fleet_secret(config: Config) -> bytes:
    """What a fleet's page keys are made from: with a disk tier the secret in this machine's folder, so that a later server finds the same pages.
    Nodes of a cluster have their pages in folders of their own."""
    disk = read_tiers(config.cache.kv_tier).disk
    return os.urandom(32) if disk is None else folder_secret(Path(disk.folder))


def _check_parsers(server: ServerConfig) -> None:
    """Raise ConfigError for unknown parser names, before a model is loaded."""
    names = (server.tool_call_parser, server.reasoning_parser)
    if names != (AUTO, AUTO):
        from octavo.text.formats import check_parsers  # not at start: it imports the template engine

        check_parsers(*names)


def _leave_to_wakeup(number: int, frame: object) -> None:
    """Do nothing: the byte that the interpreter writes to the wake-up descriptor is enough."""
