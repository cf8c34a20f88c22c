"""The faults, one function each: done to a server under load; what comes back is a row of the table.
Knows nothing of how the table is printed."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.torture.house import Answer, House, Load, children_of, free_port, is_alive, resident

FLAGS = ("--kv-cache-memory-bytes", "512M", "--api-processes", "2", "--step-timeout", "20")
_STREAM = b'{"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    saw: str  # what the good clients saw
    recovery_s: (
        float | None
    )  # from the fault to the next event of every stream; None: there was nothing to recover from
    lost: int  # requests that ended otherwise than without the fault
    leaked: int  # pages in use when nothing runs
    remark: str = ""


class Campaign:
    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self._num_streams, self._num_tokens = num_streams, num_tokens
        self._untroubled: list[Answer] = []

    def run(self, only: str = "") -> list[Row]:
        alone = [self.port_stolen_at_start, self.full_disk_for_logs, self.clock_jumps, self.kill_worker]
        shared = [
            self.kill_engine,
            self.freeze_engine,
            self.slow_clients,
            self.half_closed_sockets,
            self.disconnect_storm,
        ]
        chosen = [fault for fault in shared if only in fault.__name__]
        rows = []
        if chosen:
            with House(*FLAGS) as house:
                for fault in chosen:
                    rows.append(asyncio.run(fault(house)))
        rows += [fault() for fault in alone if only in fault.__name__]
        return rows

    # ── on one server, one after the other ──

    async def kill_engine(self, house: House) -> Row:
        return await self._under_load(house, "kill -9 engine", self._signal(house.engine(), signal.SIGKILL))

    async def freeze_engine(self, house: House) -> Row:
        engine = house.engine()
        row = await self._under_load(house, "SIGSTOP engine", self._signal(engine, signal.SIGSTOP))
        assert not is_alive(engine), "it was not replaced"
        return row

    async def slow_clients(self, house: House) -> Row:
        """32 clients that ask for long answers and do not read."""
        before = sum(map(resident, house.servers()))
        connections: list[socket.socket] = []

        async def fault() -> None:
            for _ in range(32):
                connections.append(_ask(house.port, receive_buffer=4096))
            await asyncio.sleep(5)

        row = await self._under_load(house, "32 clients that do not read", fault)
        grown = sum(map(resident, house.servers())) - before
        for connection in connections:
            connection.close()
        leaked = await house.used_pages()
        return Row(row.fault, row.saw, None, row.lost, leaked, f"API processes grew by {grown / 2**20:.1f} MiB")

    async def half_closed_sockets(self, house: House) -> Row:
        """Clients that ask and then close their side of the connection."""

        async def fault() -> None:
            for _ in range(64):
                connection = _ask(house.port)
                connection.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.02)
                connection.close()

        return await self._under_load(house, "64 half-closed sockets", fault)

    async def disconnect_storm(self, house: House) -> Row:
        async def fault() -> None:
            for _ in range(20):
                connections = [_ask(house.port) for _ in range(20)]
                await asyncio.sleep(0.05)
                for connection in connections:  # a reset, not a goodbye
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        return await self._under_load(house, "400 clients that reset", fault)

    # ── with a server of their own ──

    def port_stolen_at_start(self) -> Row:
        """Another program takes the port while the model loads."""
        port = free_port()
        command = [sys.executable, "-m", "octavo.cli", "serve", "--port", str(port), *FLAGS]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            time.sleep(0.6)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            _, said = process.communicate(timeout=120)
        lines = [line for line in said.splitlines() if "error" in line]
        is_told = process.returncode == 2 and len(lines) == 1 and str(port) in lines[0]
        saw = (
            "refused; the server ended with code 2 and one line"
            if is_told
            else f"code {process.returncode}: {said[-200:]}"
        )
        return Row("port stolen at start", saw, None, 0 if is_told else 1, 0)

    def full_disk_for_logs(self) -> Row:
        """Everything that is printed meets a device that is full, also when the engine is killed."""
        with House(*FLAGS, "--enable-log-requests", log="/dev/full") as house:
            row = asyncio.run(
                self._under_load(
                    house, "full disk for logs, kill -9 engine", self._signal(house.engine(), signal.SIGKILL)
                )
            )
            house.process.terminate()
            code = house.process.wait(60)
        return Row(row.fault, row.saw, row.recovery_s, row.lost + (code != 0), row.leaked, f"exit code {code}")

    def clock_jumps(self) -> Row:
        """The wall clock, as every process of the server reads it, jumps by up to a year at each look."""
        with tempfile.TemporaryDirectory(prefix="octavo-torture-") as folder:
            code = "import random, time\n_now = time.time\ntime.time = lambda: _now() + random.uniform(-3e7, 3e7)\n"
            (Path(folder) / "sitecustomize.py").write_text(code)
            with House(*FLAGS, environment={"PYTHONPATH": folder}) as house:

                async def fault() -> None:
                    await asyncio.sleep(0)

                return asyncio.run(self._under_load(house, "wall clock jumps", fault))

    def kill_worker(self) -> Row:
        """One of three ranks. What follows is exact only as far as sums over ranks are: answers are counted, not compared."""
        with House(*FLAGS, "--tensor-parallel-size", "3") as house:
            (_, rank, _) = sorted(children_of(house.engine()))
            return asyncio.run(
                self._under_load(house, "kill -9 rank 1 of 3", self._signal(rank, signal.SIGKILL), compares=False)
            )

    # ── what they share ──

    def _signal(self, pid: int, number: int) -> Callable[[], Awaitable[None]]:
        async def send() -> None:
            os.kill(pid, number)

        return send

    async def _under_load(
        self, house: House, name: str, fault: Callable[[], Awaitable[None]], compares: bool = True
    ) -> Row:
        if compares and not self._untroubled:
            self._untroubled = await Load(house, self._num_streams, self._num_tokens).run()
            assert not any(answer.error for answer in self._untroubled), "errors without any fault"
        load = Load(house, self._num_streams, self._num_tokens)
        running = asyncio.create_task(load.run())
        await load.until(self._num_streams * self._num_tokens // 4)
        began = time.monotonic()
        await fault()
        answers = await running
        pauses = [_pause_after(answer, began) for answer in answers]
        errors = [answer.error for answer in answers if answer.error]
        if compares:
            pairs = zip(answers, self._untroubled, strict=True)
            lost = sum(ours.content != theirs.content for ours, theirs in pairs)
        else:
            lost = sum(bool(answer.error) or answer.usage[1] != self._num_tokens for answer in answers)
        longest = max(answer.longest_pause for answer in answers)
        saw = f"{len(answers) - lost} of {len(answers)} whole, longest pause {longest:.1f} s"
        if errors:
            saw += f"; {len(errors)} errors: {errors[0]}"
        leaked = await house.used_pages()
        return Row(name, saw, max(pauses), lost, leaked)


def _pause_after(answer: Answer, moment: float) -> float:
    """Until its next event."""
    return next((when - moment for when in answer.times if when > moment), 0.0)


def _ask(port: int, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        connection.sendall(_REQUEST % (len(_STREAM), _STREAM))
    return connection
