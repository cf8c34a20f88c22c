"""The relay of a replica that Ray has placed: it stands where the engine's process would be if that were on this machine. The supervisor starts
it with the same line, API processes connect to the same address, the heartbeat is in the same memory. What they say goes to the engine's node over an
authenticated connection, and comes back.

It is also the fence. When the replica is taken for dead, the relay is killed: nothing that the engine still sends can arrive, and its agents
end it when they notice that the connection is closed."""

import contextlib
import functools
import logging
import os
import queue
import secrets
import signal
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
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
    AgentEnded,
    AgentHello,
    AgentMessage,
    EngineEnd,
    EnginePlace,
    LogText,
    NoRoomYet,
    Placed,
    PlaceFailed,
    RunAgent,
    RunEngine,
    StopEngine,
    ToRelay,
    WantPlace,
)
from octavo.cluster.mirror import Copier, apply
from octavo.config import AUTO
from octavo.errors import ConfigError
from octavo.ipc.clock import boot_id
from octavo.ipc.heartbeat import ENGINE_PARTS, LEGACY_PARTS, SERVER_PARTS, Heartbeat, block_memory
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.secure_channel import SecureConnection, SecureListener
from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.messages import EngineReport, RankEnded, RunRank
from octavo.observe import logs
from octavo.observe.history import history_bytes

log = logging.getLogger("octavo.cluster")

PLACER = "placer"
"""Name of the placer's socket, in the folder of the server's sockets."""
_CONNECT_S = 120.0  # that agents have to connect
_PLACER_S = 60.0  # that a placer which is started again has until it listens
_LINGER_MS = 500
_SIGNS_S = 0.25
_NUM_PROBES = 9  # of another machine's clock; the one with the shortest way counts


class _Agent:
    """One rank's agent: its connections."""

    def __init__(self) -> None:
        self.channels: dict[str, SecureConnection] = {}
        self.boot = ""

    @property
    def is_complete(self) -> bool:
        return len(self.channels) == 2

    def send(self, message: AgentMessage) -> None:
        self.channels["data"].send_bytes(CONTROL + msgspec.msgpack.encode(message))


class Relay:
    def __init__(self, launch: EngineLaunch, output: int) -> None:
        """`output`: descriptor at which the supervisor reads lines."""
        self._launch, self._output = launch, output
        self._replica = 0 if launch.member is None else launch.member.replica
        self._folder = Path(launch.address.removeprefix("ipc://")).parent
        self._secret = secrets.token_bytes(32)
        self._events: queue.SimpleQueue[EngineEnd | AgentEnded] = queue.SimpleQueue()
        self._agents: list[_Agent] = []
        self._joined = threading.Condition()
        self._is_stopping = False
        self._placed: Placed | None = None

    def run(self) -> int:
        """→ the exit code of this process. Raises ConfigError for what the user must change."""
        placer = self._connect_placer()
        placed = self._placed = self._wait_for_place(placer)
        self._tell(EnginePlace(words_of(placed)))
        self._agents = [_Agent() for _ in placed.places]
        listener = SecureListener(placed.host, self._secret, self._join)
        host, port = listener.address
        for rank in range(len(self._agents)):
            arguments = ["-P", "-m", "octavo.cluster.agent", f"{host}:{port}", str(rank)]
            arguments.append(self._launch.config.server.log_format)
            command = RunAgent(rank, arguments, {"OCTAVO_AGENT_SECRET": self._secret.hex()})
            placer.send_bytes(msgspec.msgpack.encode(command))
        threading.Thread(target=self._follow_placer, args=(placer,), daemon=True).start()
        end = self._gather(placed)
        listener.close()
        if end is None:
            self._start(placed)
            event = self._events.get()
            end = event if isinstance(event, EngineEnd) else self._lost(event)
        self._tell(end)
        return end.code if 0 <= end.code < 256 else 1

    def stop(self) -> None:
        """Ask the engine to end."""
        self._is_stopping = True
        if self._agents and self._agents[0].is_complete:
            with contextlib.suppress(OSError):
                self._agents[0].send(StopEngine())
        else:
            os._exit(0)  # nothing runs yet

    # ── a place ──

    def _connect_placer(self) -> "Connection[Any, Any]":
        deadline = time.monotonic() + _PLACER_S
        while True:
            try:
                return Client(str(self._folder / PLACER), "AF_UNIX")
            except OSError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"the placer has not listened within {_PLACER_S:.0f} s") from None
                time.sleep(0.1)

    def _wait_for_place(self, placer: "Connection[Any, Any]") -> Placed:
        config = self._launch.config
        threads = config.parallel.cpu_threads
        want = WantPlace(
            self._replica,
            config.parallel.num_ranks,
            config.model.device,
            0 if threads == AUTO else int(threads),
            self._launch.is_patient,
        )
        placer.send_bytes(msgspec.msgpack.encode(want))
        while True:
            match msgspec.msgpack.decode(placer.recv_bytes(), type=ToRelay):
                case NoRoomYet() as message:
                    self._tell(EnginePlace(f"waits for room in the cluster: {message.words}", is_waiting=True))
                    log.warning("replica %d waits: %s", self._replica, message.words)
                case Placed() as placed:
                    return placed
                case PlaceFailed() as failed:
                    which = "" if self._launch.member is None else f"replica {self._replica}: "
                    raise ConfigError(which + failed.message)
                case AgentEnded():
                    pass

    def _follow_placer(self, placer: "Connection[Any, Any]") -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = msgspec.msgpack.decode(placer.recv_bytes(), type=ToRelay)
                if isinstance(message, AgentEnded):
                    self._events.put(message)
        # The placer has ended, and Ray ends its actors with it: the agents' connections will tell.

    # ── agents ──

    def _join(self, connection: SecureConnection, said: bytes) -> None:
        """Called by a thread of the listener, for an agent that knows the secret."""
        hello = msgspec.msgpack.decode(said, type=AgentHello)
        with self._joined:
            if hello.rank >= len(self._agents) or hello.channel in self._agents[hello.rank].channels:
                connection.close()
                return
            agent = self._agents[hello.rank]
            agent.channels[hello.channel], agent.boot = connection, hello.boot
            self._joined.notify_all()

    def _gather(self, placed: Placed) -> EngineEnd | None:
        """Wait until all agents have connected. → None, or why not."""
        deadline = time.monotonic() + _CONNECT_S
        with self._joined:
            while missing := [rank for rank, agent in enumerate(self._agents) if not agent.is_complete]:
                if not self._events.empty():
                    event = self._events.get()
                    assert isinstance(event, AgentEnded)
                    return self._lost(event)
                if time.monotonic() > deadline:
                    where = placed.places[missing[0]].words
                    return EngineEnd(1, f"{where} has not connected to {placed.host} within {_CONNECT_S:.0f} s")
                self._joined.wait(0.2)
        return None

    def _lost(self, event: AgentEnded) -> EngineEnd:
        assert self._placed is not None
        return EngineEnd(1, f"{self._placed.places[event.rank].words}: {event.words}")

    def _start(self, placed: Placed) -> None:
        """Start the engine, and everything that keeps its place here."""
        first = self._agents[0]
        heartbeat = Heartbeat(self._launch.heartbeat_fd, self._replica)
        heartbeat.reset()
        heartbeat.set_pid(0)
        heartbeat.close()
        signs = first.channels["signs"]
        offset = 0 if first.boot and first.boot == boot_id() else clock_offset(signs)
        memory = block_memory(self._launch.heartbeat_fd, self._replica)
        history = history_bytes(self._launch.history_fd)
        signs.send_bytes(HEARTBEAT + Copier(memory, LEGACY_PARTS).changes())
        signs.send_bytes(HISTORY + Copier(history, ((0, len(history)),), assume_zero=True).changes())
        launch = msgspec.json.encode(self._launch)
        first.send(
            RunEngine(launch, self._replica, offset, placed.cpu_threads, placed.num_neighbours, list(placed.places))
        )
        if self._is_stopping:
            first.send(StopEngine())
        for rank, agent in enumerate(self._agents):
            threading.Thread(target=self._follow, args=(rank, agent), daemon=True).start()
        threading.Thread(target=self._receive_signs, args=(signs, memory, history), daemon=True).start()
        threading.Thread(target=self._send_signs, args=(signs, memory), daemon=True).start()
        threading.Thread(target=self._forward, args=(first,), daemon=True).start()

    def _forward(self, first: _Agent) -> None:
        """API processes → the engine."""
        data = first.channels["data"]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        receiver = context.socket(zmq.PULL)
        receiver.set_hwm(0)
        receiver.bind(self._launch.address)
        with contextlib.suppress(OSError):
            while True:
                data.send_bytes(TO_ENGINE + receiver.recv())

    def _follow(self, rank: int, agent: _Agent) -> None:
        """What an agent sends, until its connection ends."""
        data = agent.channels["data"]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        senders: dict[bytes, zmq.Socket[bytes]] = {}
        decode = msgspec.msgpack.Decoder(AgentMessage).decode
        end: EngineEnd
        try:
            while True:
                raw = data.recv_bytes()
                if raw[:1] == TO_API:
                    start = 2 + raw[1]
                    name = raw[2:start]
                    if name not in senders:
                        senders[name] = context.socket(zmq.PUSH)
                        senders[name].set_hwm(0)
                        senders[name].connect(f"ipc://{self._folder / Path(name.decode()).name}")
                    senders[name].send(raw[start:])
                    continue
                match decode(raw[1:]):
                    case EngineReport() as report:
                        self._tell(report)
                    case LogText() as said:
                        os.write(2, said.text)
                    case RunRank() as command:
                        self._run_rank(command)
                    case RankEnded() as ended:
                        with contextlib.suppress(OSError):
                            self._agents[0].send(ended)
                    case EngineEnd() as found:
                        end = found
                        break
                    case _:
                        raise OSError("an agent sent what only a relay sends")
        except (EOFError, OSError):
            assert self._placed is not None
            end = EngineEnd(1, f"the connection to {self._placed.places[rank].words} is lost")
        context.destroy(linger=_LINGER_MS)  # waits until the engine's last messages have reached the API processes
        self._events.put(end)

    def _run_rank(self, command: RunRank) -> None:
        assert self._placed is not None
        environment = self._placed.places[command.rank].environment
        with contextlib.suppress(OSError):  # the thread that follows that rank says so
            self._agents[command.rank].send(msgspec.structs.replace(command, environment=environment))

    def _receive_signs(self, signs: SecureConnection, memory: Any, history: Any) -> None:
        kinds = {HEARTBEAT: (memory, ENGINE_PARTS), HISTORY: (history, ((0, len(history)),))}
        with contextlib.suppress(EOFError, OSError):
            while True:
                raw = signs.recv_bytes()
                target, parts = kinds[raw[:1]]
                apply(target, raw[1:], parts)

    def _send_signs(self, signs: SecureConnection, memory: Any) -> None:
        """What others write and the engine's metrics show."""
        copier = Copier(memory, SERVER_PARTS)
        with contextlib.suppress(OSError):
            while True:
                if changes := copier.changes():
                    signs.send_bytes(HEARTBEAT + changes)
                time.sleep(_SIGNS_S)

    # ── the supervisor ──

    def _tell(self, message: EnginePlace | EngineEnd | EngineReport) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._output, msgspec.json.encode(message) + b"\n")


def words_of(placed: Placed) -> str:
    """Where a replica's ranks are, for people."""
    counts: dict[str, int] = {}
    for place in placed.places:
        counts[place.words] = counts.get(place.words, 0) + 1
    if len(placed.places) == 1:
        place = placed.places[0]
        threads = "1 thread" if placed.cpu_threads == 1 else f"{placed.cpu_threads} threads"
        what = threads if placed.cpu_threads else f"GPU {', '.join(place.gpus)}"
        return f"{place.words}, {what}"
    return ", ".join(f"{words}: {count} {'rank' if count == 1 else 'ranks'}" for words, count in counts.items())


def clock_offset(signs: SecureConnection) -> int:
    """Nanoseconds by which the other machine's clock is ahead of this one's, to half of the shortest way there and back."""
    best: tuple[int, int] | None = None
    for _ in range(_NUM_PROBES):
        sent = time.monotonic_ns()
        signs.send_bytes(ASK_TIME)
        raw = signs.recv_bytes()
        came = time.monotonic_ns()
        assert raw[:1] == TIME, "nothing else is sent before the engine has started"
        offset = int.from_bytes(raw[1:], "little") - (sent + came) // 2
        best = min(best or (came - sent, offset), (came - sent, offset))
    assert best is not None
    return best[1]


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGKILL)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineLaunch)
    output = os.dup(1)
    os.set_inheritable(output, False)
    os.dup2(2, 1)
    logs.install(logging.WARNING, launch.config.server.log_format)
    relay = Relay(launch, output)
    threading.Thread(target=functools.partial(_watch_supervisor, relay), daemon=True).start()
    try:
        return relay.run()
    except ConfigError as error:
        log.error("%s", error.message)
        return 2
    except (EOFError, OSError) as error:
        relay._tell(EngineEnd(1, f"the placer has ended ({error or 'end of file'})"))
        return 1


def _watch_supervisor(relay: Relay) -> None:
    was_asked = False
    while os.read(0, 4096):
        was_asked = True
    if not was_asked:  # the supervisor has died
        os._exit(0)
    relay.stop()


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        log.critical("the relay of a replica ends", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)
