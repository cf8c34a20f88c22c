"""The API processes of one server: started, told of engines, and started again where one ended that nobody asked to.
Knows nothing of engines but their addresses, and decides nothing: the supervisor asks.

Who ends takes its clients' connections with it. Another takes its place under the same number, with addresses of its own, so
that nothing meant for one is ever taken for another's."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import zmq

from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.launch import ApiLaunch
from octavo.ipc.subprocesses import spawn
from octavo.messages import EngineStarted, FromSupervisor, ServerGone
from octavo.supervisor.acceptor import Acceptor
from octavo.supervisor.watchdog import Restarts, ServerWatch

_FAREWELL_MS = 1000


class ApiProcess:
    """One number's process, and those before it."""

    def __init__(self, origin: int, restarts: Restarts, watch: ServerWatch) -> None:
        self.origin, self.restarts, self.watch = origin, restarts, watch
        self.verdict = ""  # why it was killed by us
        self.process: subprocess.Popen[bytes] | None = None
        self.orders: zmq.Socket[bytes] | None = None
        self.number = 0  # of processes so far
        self.started = 0.0
        self.is_ready = False
        self.restart_at: float | None = None
        self.channel: socket.socket | None = None  # over which it will be dealt connections, once it is ready

    def close_channel(self) -> None:
        """Of a process that was never ready."""
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
        """`template`: of everybody's order; what differs is filled in."""
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
    def has_ended(self) -> bool:
        return all(slot.has_ended for slot in self.slots)

    def start(self, slot: ApiProcess, engine_address: str, num_engines: int) -> subprocess.Popen[bytes]:
        slot.number += 1
        slot.is_ready, slot.restart_at, slot.started, slot.verdict = False, None, time.monotonic(), ""
        self._heartbeat.forget(slot.origin)
        slot.close_channel()
        slot.channel, channel = self._acceptor.channel()
        order = msgspec.structs.replace(
            self._template,
            fd=channel.fileno(),
            origin=slot.origin,
            engine_address=engine_address,
            reply_address=self._reply_address(slot, num_engines),
            orders_address=f"ipc://{self._folder}/orders-{slot.origin}-{slot.number}",
        )
        if slot.orders is not None:
            slot.orders.close(linger=0)
        slot.orders = self._context.socket(zmq.PUSH)
        slot.orders.set_hwm(0)
        slot.orders.connect(order.orders_address)
        slot.process = spawn("octavo.server.process", order, pass_fds=(channel.fileno(), order.heartbeat_fd))
        channel.close()
        return slot.process

    def welcome(self, slot: ApiProcess) -> None:
        """It can answer: connections are dealt to it from now on."""
        slot.is_ready = True
        if slot.channel is not None:
            self._acceptor.deal_to(slot.channel)
        slot.channel = None

    def look(self, engine_since: float | None) -> None:
        """Kill those whose event loop does not turn: they would be dealt connections, and answer none. And those that never start:
        they wait for the engine, which is there since `engine_since`, if it is."""
        limit = self._template.config.server.start_timeout
        for slot in self.slots:
            if slot.verdict or slot.process is None or slot.has_ended:
                continue
            if not slot.is_ready:
                if limit and engine_since is not None and time.monotonic() - max(slot.started, engine_since) > limit:
                    slot.verdict = (
                        f"API process {slot.origin} is not ready after {limit:g} s (--start-timeout) and is killed"
                    )
                    slot.process.kill()
            elif (problem := slot.watch.look(slot.process.pid)) is not None:
                slot.verdict = f"API process {slot.origin} hangs and is killed: {problem}"
                slot.process.kill()

    def due(self, now: float) -> list[ApiProcess]:
        """Whose place is to be taken now."""
        return [slot for slot in self.slots if slot.restart_at is not None and now >= slot.restart_at]

    def tell(self, order: FromSupervisor) -> None:
        for slot in self.slots:
            self._send(slot, order)

    def tell_of_engine(self, engine_address: str, num_engines: int) -> None:
        for slot in self.slots:
            self._send(slot, EngineStarted(engine_address, self._reply_address(slot, num_engines)))

    def tell_engine_of(self, slot: ApiProcess, engine_address: str, num_engines: int) -> None:
        """That the process is no more: nobody waits for what it asked."""
        socket = self._context.socket(zmq.PUSH)
        socket.connect(engine_address)
        socket.send(msgspec.msgpack.encode(ServerGone(slot.origin, self._reply_address(slot, num_engines))))
        socket.close(linger=_FAREWELL_MS)

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _send(self, slot: ApiProcess, order: FromSupervisor) -> None:
        assert slot.orders is not None
        if not slot.has_ended:  # else its successor is told by its own order
            slot.orders.send(msgspec.msgpack.encode(order))

    def _reply_address(self, slot: ApiProcess, num_engines: int) -> str:
        return f"ipc://{self._folder}/api-{slot.origin}-{slot.number}-{num_engines}"
