"""The faults, one function each: each one disturbs a server under load and returns a row of the table."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from benchmarks.torture.house import Answer, House, Load, resident
from tests.processes import is_alive

FLAGS = ("--kv-cache-memory-bytes", "512M", "--api-processes", "2", "--step-timeout", "20")
_STREAM = b'{"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    saw: str  # what the good clients saw
    recovery_s: (
        float | None
    )  # from the fault to the next event of every stream; None: there was nothing to recover from
    lost: int  # requests whose result differs from the run without the fault
    leaked: int  # pages in use when nothing runs
    remark: str = ""


class Campaign:
    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self._num_streams, self._num_tokens = num_streams, num_tokens
        self._untroubled: list[Answer] = []

    def run(self, only: str = "") -> Iterator[Row]:
        shared = [
            self.kill_engine,
            self.freeze_engine,
            self.kill_api_process,
            self.freeze_api_process,
            self.slow_clients,
            self.half_closed_sockets,
            self.disconnect_storm,
        ]
        chosen = [fault for fault in shared if only in fault.__name__]
        if chosen:
            with House(*FLAGS) as house:
                for fault in chosen:
                    yield asyncio.run(fault(house))

    # ── on one server, one after the other ──

    async def kill_engine(self, house: House) -> Row:
        return await self._under_load(house, "kill -9 engine", signal_to(house.engine(), signal.SIGKILL))

    async def freeze_engine(self, house: House) -> Row:
        engine = house.engine()
        row = await self._under_load(house, "SIGSTOP engine", signal_to(engine, signal.SIGSTOP))
        assert not is_alive(engine), "the engine was not replaced"
        return row

    async def kill_api_process(self, house: House) -> Row:
        """End one of two API processes. Its clients see their connections close and ask again, as clients do."""
        return await self._end_api_process(house, "kill -9 API process", signal.SIGKILL)

    async def freeze_api_process(self, house: House) -> Row:
        return await self._end_api_process(house, "SIGSTOP API process", signal.SIGSTOP)

    async def _end_api_process(self, house: House, name: str, number: int) -> Row:
        doomed, *others = house.servers()
        load = Load(house, self._num_streams, self._num_tokens)
        row = await self._under_load(house, name, signal_to(doomed, number), load, asks_again=True)
        while len(servers := house.servers()) < 2 or not await house.is_well():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert doomed not in servers and others[0] in servers, "the API process was not replaced, or the other one was"
        remark = f"{load.num_again} connections closed, requests sent again"
        return Row(row.fault, row.saw, row.recovery_s, row.lost, row.leaked, remark)

    async def slow_clients(self, house: House) -> Row:
        """32 clients ask for long answers and do not read."""
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
        """Clients send a request, close their side of the connection, and stay: the server must not hold their requests."""
        connections: list[socket.socket] = []

        async def fault() -> None:
            for _ in range(64):
                connections.append(_ask(house.port))
                connections[-1].shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.02)

        row = await self._under_load(house, "64 half-closed sockets", fault)
        for connection in connections:
            connection.close()
        return row

    async def disconnect_storm(self, house: House) -> Row:
        async def fault() -> None:
            for _ in range(20):
                connections = [_ask(house.port) for _ in range(20)]
                await asyncio.sleep(0.05)
                for connection in connections:  # a reset, not an orderly close
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        return await self._under_load(house, "400 clients that reset", fault)

    # ── shared ──

    async def untroubled(self, house: House) -> list[Answer]:
        """Return the answers of the same clients without a fault."""
        answers = await Load(house, self._num_streams, self._num_tokens).run()
        assert not any(answer.error for answer in answers), "errors without any fault"
        return answers

    async def _under_load(
        self,
        house: House,
        name: str,
        fault: Callable[[], Awaitable[None]],
        load: Load | None = None,
        asks_again: bool = False,
    ) -> Row:
        if not self._untroubled:
            self._untroubled = await self.untroubled(house)
        load = load or Load(house, self._num_streams, self._num_tokens)
        return await under_load(house, name, fault, load, self._untroubled, asks_again)


def signal_to(pid: int, number: int) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        os.kill(pid, number)

    return send


async def under_load(
    house: House,
    name: str,
    fault: Callable[[], Awaitable[None]],
    load: Load,
    untroubled: list[Answer],
    asks_again: bool = False,
) -> Row:
    """Inject the fault once every stream has started and a quarter of all events has arrived."""
    running = asyncio.create_task(load.run(asks_again))
    await load.until(sum(answer.usage[1] for answer in untroubled) // 4)
    began = time.monotonic()
    await fault()
    answers = await running
    pauses = [_pause_after(answer, began) for answer in answers]
    errors = [answer.error for answer in answers if answer.error]
    lost = sum(ours.content != theirs.content for ours, theirs in zip(answers, untroubled, strict=True))
    longest = max(answer.longest_pause for answer in answers)
    saw = f"{len(answers) - lost} of {len(answers)} whole, longest pause {longest:.1f} s"
    if errors:
        saw += f"; {len(errors)} errors: {errors[0]}"
    return Row(name, saw, max(pauses), lost, await house.used_pages())


def _pause_after(answer: Answer, moment: float) -> float:
    """Return the seconds from the moment to the answer's next event."""
    return next((when - moment for when in answer.times if when > moment), 0.0)


def _ask(port: int, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        connection.sendall(_REQUEST % (len(_STREAM), _STREAM))
    return connection
