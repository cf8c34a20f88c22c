"""The agent of a rank, on its node: it connects to its replica's relay, and runs what that asks for. The first rank's
agent runs the engine, and stands for supervisor and API processes there; with several ranks, each agent runs its rank.

Started by a Ray actor as `python -m octavo.cluster.agent HOST:PORT RANK LOG_FORMAT`, with the replica's secret in
OCTAVO_AGENT_SECRET. When the connection is lost, or the actor ends, everything that it has started ends, too."""

import contextlib
import hmac
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.cluster.messages import (
    ASK_TIME,
    CONTROL,
    HEARTBEAT,
    HISTORY,
    TIME,
    TO_API,
    TO_ENGINE,
    AgentHello,
    AgentMessage,
    EngineEnd,
    LogText,
    RunEngine,
    StopEngine,
)
from octavo.cluster.mirror import Copier, apply
from octavo.config import replace
from octavo.errors import ConfigError
from octavo.ipc.clock import boot_id
from octavo.ipc.heartbeat import ENGINE_PARTS, LEGACY_PARTS, SERVER_PARTS, block_memory, shared_memory
from octavo.ipc.launch import EngineLaunch, PlacedRank, PlacedRanks
from octavo.ipc.secure_channel import Refused, SecureConnection, connect
from octavo.ipc.stderr import say
from octavo.ipc.subprocesses import describe_exit, signal_at_parents_end, spawn
from octavo.messages import EngineReport, Hello, RankEnded, RunRank, ServerGone, ToEngine
from octavo.observe import logs
from octavo.observe.history import history_bytes, history_memory
from octavo.recording.crash_files import CrashFiles
from octavo.supervisor.runtime_dir import RuntimeDir, remove_abandoned
from octavo.weights.sources.source import resolve

log = logging.getLogger("octavo.cluster")

ENGINE_MODULE = "octavo.cluster.engine"
SIGN_SECONDS = 0.05
"""Between two looks at the engine's heartbeat."""
_HISTORY_S = 1.0
_MAX_LINE = 1 << 16
_STOP_S = 5.0
_SEAL_S = 0.5  # that clients wait for the recording of an engine that has crashed


class Agent:
    def __init__(
        self, rank: int, data: SecureConnection, signs: SecureConnection, forwarder: "LogForwarder", secret: bytes
    ) -> None:
        self._rank, self._data, self._signs, self._logs = rank, data, signs, forwarder
        self._rank_secret = hmac.digest(secret, b"octavo ranks", "sha256")  # never sent
        self._todo: queue.SimpleQueue[AgentMessage | None] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[bytes]] = []
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # on the signs' channel
        self._engine: EngineHost | None = None
        self._has_engine = threading.Event()  # or will have none

    def run(self) -> int:
        """Run until the relay is gone, or the engine has ended. All processes are started by this thread: the kernel ends them with it."""
        for work in (self._receive, self._receive_signs):
            threading.Thread(target=work, daemon=True).start()
        try:
            while (message := self._todo.get()) is not None:
                match message:
                    case RunEngine():
                        try:
                            self._engine = EngineHost(
                                message, self._data, self._signs, self._said, self._logs, self._rank_secret, self._todo
                            )
                        except ConfigError as error:
                            log.error("%s", error.message)
                            logging.shutdown()
                            self._logs.drain()
                            self._send(EngineEnd(2))
                        self._has_engine.set()
                    case RunRank():
                        self._run_rank(message)
                    case StopEngine() if self._engine is not None:
                        self._engine.stop()
                    case RankEnded() if self._engine is not None:
                        self._engine.rank_ended(message)
                    case EngineEnd():  # from the thread that waits for it
                        self._send(message)
                        return 0
                    case _:
                        pass
            return 0
        finally:
            self._end()

    def _receive(self) -> None:
        decode = msgspec.msgpack.Decoder(AgentMessage).decode
        with contextlib.suppress(EOFError, OSError):
            while True:
                raw = self._data.recv_bytes()
                if raw[:1] == TO_ENGINE:
                    self._has_engine.wait()
                    if self._engine is not None:
                        self._engine.send(raw[1:])
                else:
                    self._todo.put(decode(raw[1:]))
        self._todo.put(None)

    def _receive_signs(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                raw = self._signs.recv_bytes()
                if raw[:1] == ASK_TIME:
                    self._signs.send_bytes(TIME + time.monotonic_ns().to_bytes(8, "little"))
                else:
                    self._said.put(raw)
        self._said.put(None)

    def _run_rank(self, command: RunRank) -> None:
        environment = {**os.environ, **command.environment, "OCTAVO_RANK_SECRET": self._rank_secret.hex()}
        child = subprocess.Popen(
            [sys.executable, *command.arguments, "with-parent"], stdin=subprocess.DEVNULL, stdout=2, env=environment
        )
        self._children.append(child)

        def wait() -> None:
            code = child.wait()
            with contextlib.suppress(OSError):
                self._send(RankEnded(self._rank, code))

        threading.Thread(target=wait, daemon=True).start()

    def _send(self, message: AgentMessage) -> None:
        self._data.send_bytes(CONTROL + msgspec.msgpack.encode(message))

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for child in self._children:
            if child.poll() is None:
                child.kill()


class EngineHost:
    """An engine on this node: its process, its shared memory, and the sockets at which it finds its API processes."""

    def __init__(
        self,
        order: RunEngine,
        data: SecureConnection,
        signs: SecureConnection,
        said: "queue.SimpleQueue[bytes | None]",
        forwarder: "LogForwarder",
        rank_secret: bytes,
        ended: "queue.SimpleQueue[AgentMessage | None]",
    ) -> None:
        """`said`: what comes on the signs' channel. `ended`: gets an EngineEnd. Raises ConfigError."""
        self._order, self._signs, self._data, self._ended = order, signs, data, ended
        self._said, self._logs = said, forwarder
        self._has_ended, self._last_look = threading.Event(), threading.Event()
        given = msgspec.json.decode(order.launch, type=EngineLaunch)
        remove_abandoned()
        self._folder = RuntimeDir()
        self._crash_files = CrashFiles(given.config.recorder)
        self._epoch = given.number
        self._heartbeat_fd, self._history_fd = shared_memory(order.replica + 1), history_memory()
        self._memory = block_memory(self._heartbeat_fd, order.replica)
        self._history = history_bytes(self._history_fd)
        for kind, memory, parts in (
            (HEARTBEAT, self._memory, LEGACY_PARTS),
            (HISTORY, self._history, ((0, len(self._history)),)),
        ):
            raw = said.get()
            assert raw is not None and raw[:1] == kind, "an engine's inheritance comes before its launch"
            apply(memory, raw[1:], parts)
        self._pipe: Connection[Any, Any] | None = None
        launch, fds = self._launch_of(given, rank_secret)
        self._process = spawn(ENGINE_MODULE, launch, fds, self._environment())
        if launch.ranks is not None:
            os.close(launch.ranks.fd)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to_engine = context.socket(zmq.PUSH)
        self._to_engine.set_hwm(0)
        self._to_engine.connect(launch.address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        for work in (self._wait, self._send_signs, self._receive_signs):
            threading.Thread(target=work, daemon=True).start()
        if self._pipe is not None:
            threading.Thread(target=self._follow_engine, args=(self._pipe,), daemon=True).start()

    def send(self, raw: bytes) -> None:
        """Pass a message of an API process on. The engine answers at addresses here, which lead to the ones there."""
        if raw[1:16].find(b"Hello") >= 0 or raw[1:24].find(b"ServerGone") >= 0:
            message = self._decoder.decode(raw)
            if isinstance(message, Hello | ServerGone):
                name = Path(message.reply_to.removeprefix("ipc://")).name
                address = f"ipc://{self._folder.path}/{name}"
                if isinstance(message, Hello):
                    self._listen(name, address)
                raw = msgspec.msgpack.encode(msgspec.structs.replace(message, reply_to=address))
        self._to_engine.send(raw)

    def stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(b"stop\n")
            self._process.stdin.close()

    def rank_ended(self, message: RankEnded) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """End the engine if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._crash_files.close(self._epoch)
        self._folder.close()

    def _launch_of(self, given: EngineLaunch, rank_secret: bytes) -> tuple[EngineLaunch, tuple[int, ...]]:
        """The launch with this machine's paths and descriptors."""
        order, config = self._order, given.config
        config = replace(
            config,
            distributed_executor_backend="mp",
            ray_address="",
            data_parallel_size=order.num_neighbours,
            min_replicas=0,
            max_replicas=0,
        )
        if order.cpu_threads:
            config = replace(config, cpu_threads=order.cpu_threads)
        path, kind = given.model_path, given.model_kind
        if not Path(path).exists():
            model = config.model
            try:
                found = resolve(
                    model.model,
                    model.revision,
                    allow_missing_weights=model.load_format == "dummy",
                    download_dir=model.download_dir,
                )
            except ConfigError as error:
                raise ConfigError(f"{order.places[0].words} has no model at {path}: {error.message}") from None
            path, kind = str(found.path), found.kind
        ranks = None
        fds = [self._heartbeat_fd, self._history_fd, *self._crash_files.ring_fds]
        if len(order.places) > 1:
            self._pipe, theirs = Pipe()
            fd = os.dup(theirs.fileno())
            theirs.close()
            fds.append(fd)
            places = [PlacedRank(each.words, each.local_rank, each.num_local_ranks) for each in order.places]
            ranks = PlacedRanks(self._data.local_address, rank_secret, fd, places)
        launch = msgspec.structs.replace(
            given,
            config=config,
            model_path=path,
            model_kind=kind,
            address=f"ipc://{self._folder.path}/engine",
            heartbeat_fd=self._heartbeat_fd,
            history_fd=self._history_fd,
            record_to=str(self._crash_files.live_folder or ""),
            ring_fd=next(iter(self._crash_files.ring_fds), -1),
            ranks=ranks,
        )
        return launch, tuple(fds)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **self._order.places[0].environment,
            "OCTAVO_CLOCK_OFFSET_NS": str(self._order.clock_offset),
        }

    def _listen(self, name: str, address: str) -> None:
        """Receive what the engine sends to one API process."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(address)
        encoded = name.encode()
        head = TO_API + bytes([len(encoded)]) + encoded

        def forward() -> None:
            with contextlib.suppress(OSError, zmq.ZMQError):
                while True:
                    self._data.send_bytes(head + socket.recv())

        threading.Thread(target=forward, daemon=True).start()

    def _wait(self) -> None:
        """Pass on the engine's report, then its end."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            for line in self._process.stdout:
                report = msgspec.json.decode(line, type=EngineReport)
                self._data.send_bytes(CONTROL + msgspec.msgpack.encode(report))
        code = self._process.wait()
        if code not in (0, 2):
            self._crash_files.seal_in_background(self._epoch)
        # The rows at its end say which requests may be its cause.
        self._has_ended.set()
        self._last_look.wait(_STOP_S)
        self._crash_files.wait(_SEAL_S)
        self._logs.drain()
        words = "" if code == 0 else f"{describe_exit(code)}, on {self._order.places[0].words}"
        self._ended.put(EngineEnd(code, words))

    def _send_signs(self) -> None:
        """Copy the engine's heartbeat to the front: a thread of its own, so that no amount of tokens delays it."""
        heartbeat = Copier(self._memory, ENGINE_PARTS, assume_zero=True)
        history = Copier(self._history, ((0, len(self._history)),))
        history.changes()  # the front has these
        due = time.monotonic() + _HISTORY_S
        with contextlib.suppress(OSError):
            while True:
                is_last = self._has_ended.wait(SIGN_SECONDS)
                if changes := heartbeat.changes():
                    self._signs.send_bytes(HEARTBEAT + changes)
                if is_last or time.monotonic() >= due:
                    due = time.monotonic() + _HISTORY_S
                    if changes := history.changes():
                        self._signs.send_bytes(HISTORY + changes)
                if is_last:
                    break
        self._last_look.set()

    def _receive_signs(self) -> None:
        while (raw := self._said.get()) is not None:
            apply(self._memory, raw[1:], SERVER_PARTS)

    def _follow_engine(self, pipe: "Connection[Any, Any]") -> None:
        """What the engine asks of its ranks' launcher."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._data.send_bytes(CONTROL + pipe.recv_bytes())


def main(arguments: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGKILL)
    host, _, port = arguments[0].rpartition(":")
    rank, secret = int(arguments[1]), bytes.fromhex(os.environ.pop("OCTAVO_AGENT_SECRET"))
    try:
        signs, data = (
            connect((host, int(port)), secret, msgspec.msgpack.encode(AgentHello(rank, channel, boot_id())))
            for channel in ("signs", "data")
        )
    except (Refused, OSError) as error:
        say(f"the agent of rank {rank} cannot reach its replica's relay at {arguments[0]}: {error}")
        return 1
    forwarder = LogForwarder(data)
    logs.install(logging.WARNING, arguments[2])
    return Agent(rank, data, signs, forwarder, secret).run()


class LogForwarder:
    """Has what this process and its children write to standard error appear in the server's log."""

    _MARK = b"\0drained\n"

    def __init__(self, data: SecureConnection) -> None:
        self._data = data
        self._reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.dup2(writer, 1)
        os.close(writer)
        self._is_drained = threading.Event()
        threading.Thread(target=self._forward, daemon=True).start()

    def drain(self) -> None:
        """Wait until all that was written so far has been sent."""
        self._is_drained.clear()
        os.write(2, self._MARK)
        self._is_drained.wait(_STOP_S)

    def _forward(self) -> None:
        rest = b""
        while read := os.read(self._reader, 1 << 16):
            rest += read
            is_marked = self._MARK in rest
            rest = rest.replace(self._MARK, b"")
            end = rest.rfind(b"\n") + 1 if len(rest) < _MAX_LINE and not is_marked else len(rest)
            if end:
                text, rest = rest[:end], rest[end:]
                with contextlib.suppress(OSError):  # the relay is gone
                    self._data.send_bytes(CONTROL + msgspec.msgpack.encode(LogText(text)))
            if is_marked:
                self._is_drained.set()


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:
        log.critical("the agent of a rank ends", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)
