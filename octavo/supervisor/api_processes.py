"""The API processes of one server: starts them, informs them about engines, and kills those that hang. When to do so is the
supervisor's decision.

The connections of an API process end with it. Its successor has the same number but its own addresses, so a message to one is
never delivered to the other."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import ApiLaunch, ReplicaAddress
from octavo.ipc.subprocesses import spawn
from octavo.messages import EngineStarted, FromSupervisor, ServerGone
from octavo.supervisor.acceptor import Acceptor
from octavo.supervisor.launcher import LineReader
from octavo.supervisor.watchdog import Restarts, ServerWatch

API_MODULE = "octavo.server.process"  # tests replace it by the same process with a planted fault
_LINGER_MS = 1000


class EngineAddress(NamedTuple):
    """Where an engine listens."""

    replica: int
    epoch: int  # number of the engine among all of the server's
    address: str
    is_lost: bool = False  # it has ended, and another one follows


class ApiProcess:
    """One API process slot: its current process and restart history."""

    def __init__(self, origin: int, restarts: Restarts, watch: ServerWatch) -> None:
        self.origin, self.restarts, self.watch = origin, restarts, watch
        self.kill_reason = ""  # why we killed it; empty: we did not
        self.process: subprocess.Popen[bytes] | None = None
        self.notices: zmq.Socket[bytes] | None = None
        self.number = 0  # processes started in this slot
        self.started = 0.0
        self.is_ready = False
        self.restart_at: float | None = None
        self.channel: socket.socket | None = None  # passes connections; the acceptor owns it once it is ready
        self.output: LineReader | None = None

    def close_channel(self) -> None:
        """Close the channel of a process that never became ready."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None


class ApiProcesses:
    def __init__(
        self,
        count: int,
        template: ApiLaunch,
        acceptor: Acceptor,
        folder: Path,
        context: "zmq.Context[zmq.Socket[bytes]]",
        heartbeat: Heartbeat,
    ) -> None:
        """`template`: what the launches of all processes have in common."""
        limit, timeout = template.config.server.max_engine_restarts, template.config.server.step_timeout
        watches = [ServerWatch(heartbeat, origin, timeout) for origin in range(count)]
        self.slots = [ApiProcess(origin, Restarts(limit), watch) for origin, watch in enumerate(watches)]
        self._heartbeat = heartbeat
        self._template, self._acceptor, self._folder, self._context = template, acceptor, folder, context

    @property
    def num_ready(self) -> int:
        return sum(slot.is_ready for slot in self.slots)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [slot.process for slot in self.slots if slot.process is not None]

    @property
    def origins(self) -> set[int]:
        """Numbers of the processes that run."""
        return {slot.origin for slot in self.slots if not slot.has_ended}

    @property
    def has_ended(self) -> bool:
        return all(slot.has_ended for slot in self.slots)

    def start(self, slot: ApiProcess, engines: Sequence[EngineAddress], is_fleet: bool) -> subprocess.Popen[bytes]:
        """`engines`: the current ones. Without a fleet there is one; a fleet may have none for a moment."""
        first = engines[0] if engines else EngineAddress(0, 0, "")
        slot.number += 1
        slot.is_ready, slot.restart_at, slot.started, slot.kill_reason = False, None, time.monotonic(), ""
        self._heartbeat.forget(slot.origin)
        slot.close_channel()
        slot.channel, channel = self._acceptor.channel()
        launch = msgspec.structs.replace(
            self._template,
            fd=channel.fileno(),
            origin=slot.origin,
            engine_address=first.address,
            reply_address=self.reply_address(slot, first.epoch),
            replicas=[
                ReplicaAddress(
                    each.replica, each.epoch, each.address, self.reply_address(slot, each.epoch), each.is_lost
                )
                for each in engines
                if is_fleet
            ],
            supervisor_address=f"ipc://{self._folder}/notices-{slot.origin}-{slot.number}",
        )
        if slot.notices is not None:
            slot.notices.close(linger=0)
        slot.notices = self._context.socket(zmq.PUSH)
        slot.notices.set_hwm(0)
        slot.notices.connect(launch.supervisor_address)
        slot.process = spawn(API_MODULE, launch, pass_fds=(channel.fileno(), launch.heartbeat_fd))
        assert slot.process.stdout is not None
        slot.output = LineReader(slot.process.stdout.fileno())
        channel.close()
        return slot.process

    def mark_ready(self, slot: ApiProcess) -> None:
        """The process can answer: let the acceptor pass connections to it."""
        slot.is_ready = True
        if slot.channel is not None:
            self._acceptor.add_channel(slot.channel)
        slot.channel = None

    def look(self, engine_since: float | None) -> None:
        """Kill processes whose event loop is blocked, because they would get connections and answer none; and processes that do
        not become ready within --start-timeout. They wait for the engine, so the time counts from `engine_since`, when the engine
        became ready (None: it is not)."""
        limit = self._template.config.server.start_timeout
        for slot in self.slots:
            if slot.kill_reason or slot.process is None or slot.has_ended:
                continue
            if not slot.is_ready:
                if limit and engine_since is not None and time.monotonic() - max(slot.started, engine_since) > limit:
                    slot.kill_reason = (
                        f"API process {slot.origin} is not ready after {limit:g} s (--start-timeout) and is killed"
                    )
                    slot.process.kill()
            elif (problem := slot.watch.look(slot.process.pid)) is not None:
                slot.kill_reason = f"API process {slot.origin} hangs and is killed: {problem}"
                slot.process.kill()

    def due(self, now: float) -> list[ApiProcess]:
        """Return the slots whose restart is due."""
        return [slot for slot in self.slots if slot.restart_at is not None and now >= slot.restart_at]

    def send_all(self, notice: FromSupervisor) -> None:
        for slot in self.slots:
            self._send(slot, notice)

    def announce_engine(self, engine: EngineAddress) -> None:
        for slot in self.slots:
            reply_address = self.reply_address(slot, engine.epoch)
            self._send(slot, EngineStarted(engine.address, reply_address, engine.replica, engine.epoch))

    def announce_end(self, slot: ApiProcess, engine: EngineAddress) -> None:
        """Tell the engine that this process has ended, so that it aborts the process's requests."""
        socket = self._context.socket(zmq.PUSH)
        socket.connect(engine.address)
        socket.send(msgspec.msgpack.encode(ServerGone(slot.origin, self.reply_address(slot, engine.epoch))))
        socket.close(linger=_LINGER_MS)

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _send(self, slot: ApiProcess, notice: FromSupervisor) -> None:
        assert slot.notices is not None
        if not slot.has_ended:  # its successor gets the current addresses in its launch
            slot.notices.send(msgspec.msgpack.encode(notice))

    def reply_address(self, slot: ApiProcess, epoch: int) -> str:
        return f"ipc://{self._folder}/api-{slot.origin}-{slot.number}-{epoch}"
