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

from octavo.ipc.heartbeat import Pulse
from octavo.ipc.launch import ServerOrder
from octavo.ipc.subprocesses import spawn
from octavo.messages import EngineStarted, FromSupervisor, ServerGone
from octavo.supervisor.acceptor import Reception
from octavo.supervisor.watchdog import Restarts, ServerWatch

_FAREWELL_MS = 1000


class Member:
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


class Fleet:
    def __init__(
        self,
        count: int,
        template: ServerOrder,
        reception: Reception,
        folder: Path,
        context: "zmq.Context[zmq.Socket[bytes]]",
        pulse: Pulse,
    ) -> None:
        """`template`: of everybody's order; what differs is filled in."""
        limit, timeout = template.config.server.max_engine_restarts, template.config.server.step_timeout
        watches = [ServerWatch(pulse, origin, timeout) for origin in range(count)]
        self.members = [Member(origin, Restarts(limit), watch) for origin, watch in enumerate(watches)]
        self._pulse = pulse
        self._template, self._reception, self._folder, self._context = template, reception, folder, context

    @property
    def num_ready(self) -> int:
        return sum(member.is_ready for member in self.members)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [member.process for member in self.members if member.process is not None]

    @property
    def has_ended(self) -> bool:
        return all(member.has_ended for member in self.members)

    def start(self, member: Member, engine_address: str, num_engines: int) -> subprocess.Popen[bytes]:
        member.number += 1
        member.is_ready, member.restart_at, member.started, member.verdict = False, None, time.monotonic(), ""
        self._pulse.forget(member.origin)
        member.close_channel()
        member.channel, channel = self._reception.channel()
        order = msgspec.structs.replace(
            self._template,
            fd=channel.fileno(),
            origin=member.origin,
            engine_address=engine_address,
            reply_address=self._reply_address(member, num_engines),
            orders_address=f"ipc://{self._folder}/orders-{member.origin}-{member.number}",
        )
        if member.orders is not None:
            member.orders.close(linger=0)
        member.orders = self._context.socket(zmq.PUSH)
        member.orders.set_hwm(0)
        member.orders.connect(order.orders_address)
        member.process = spawn("octavo.server.process", order, pass_fds=(channel.fileno(), order.pulse_fd))
        channel.close()
        return member.process

    def welcome(self, member: Member) -> None:
        """It can answer: connections are dealt to it from now on."""
        member.is_ready = True
        if member.channel is not None:
            self._reception.deal_to(member.channel)
        member.channel = None

    def look(self, engine_since: float | None) -> None:
        """Kill those whose event loop does not turn: they would be dealt connections, and answer none. And those that never start:
        they wait for the engine, which is there since `engine_since`, if it is."""
        limit = self._template.config.server.start_timeout
        for member in self.members:
            if member.verdict or member.process is None or member.has_ended:
                continue
            if not member.is_ready:
                if limit and engine_since is not None and time.monotonic() - max(member.started, engine_since) > limit:
                    member.verdict = (
                        f"API process {member.origin} is not ready after {limit:g} s (--start-timeout) and is killed"
                    )
                    member.process.kill()
            elif (problem := member.watch.look(member.process.pid)) is not None:
                member.verdict = f"API process {member.origin} hangs and is killed: {problem}"
                member.process.kill()

    def due(self, now: float) -> list[Member]:
        """Whose place is to be taken now."""
        return [member for member in self.members if member.restart_at is not None and now >= member.restart_at]

    def tell(self, order: FromSupervisor) -> None:
        for member in self.members:
            self._send(member, order)

    def tell_of_engine(self, engine_address: str, num_engines: int) -> None:
        for member in self.members:
            self._send(member, EngineStarted(engine_address, self._reply_address(member, num_engines)))

    def tell_engine_of(self, member: Member, engine_address: str, num_engines: int) -> None:
        """That the process is no more: nobody waits for what it asked."""
        socket = self._context.socket(zmq.PUSH)
        socket.connect(engine_address)
        socket.send(msgspec.msgpack.encode(ServerGone(member.origin, self._reply_address(member, num_engines))))
        socket.close(linger=_FAREWELL_MS)

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _send(self, member: Member, order: FromSupervisor) -> None:
        assert member.orders is not None
        if not member.has_ended:  # else its successor is told by its own order
            member.orders.send(msgspec.msgpack.encode(order))

    def _reply_address(self, member: Member, num_engines: int) -> str:
        return f"ipc://{self._folder}/api-{member.origin}-{member.number}-{num_engines}"
