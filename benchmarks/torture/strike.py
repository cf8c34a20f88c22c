"""Carries out an attack: its rounds of connections, and the answers."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from benchmarks.torture.attacks.base import Answer, Attack, Door, Send

_LOOK_S = 0.5
_SLICE = 256 * 1024
_KEPT = 2**20  # bytes of a body
_MAX_HEAD = 2**20


class Battle:
    """An attack that is about to begin: the bytes of its first round are made already."""

    def __init__(self, attack: Attack, door: Door, dice: random.Random) -> None:
        self._attack, self._door = attack, door
        self._rounds = attack.strike(door, dice)
        self._first = list(next(self._rounds))
        self.answers: list[Answer] = []  # of all rounds
        self.last: list[Answer] = []  # of the last round
        self.is_over = False  # its time ran out
        self._is_stopped = threading.Event()

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Run to its end, or until `is_enough`, which is asked twice a second."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(asyncio.run, self._fight_until_stopped())
            while not wait([done], timeout=_LOOK_S).done:
                if is_enough():
                    self._is_stopped.set()
            done.result()

    async def _fight_until_stopped(self) -> None:
        task = asyncio.create_task(self.fight())
        while not self._is_stopped.is_set() and not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S / 4)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @property
    def was_stopped(self) -> bool:
        return self._is_stopped.is_set()

    async def fight(self) -> None:
        until = time.monotonic() + self._attack.seconds
        sends: Sequence[Send] = self._first
        try:
            while True:
                self.last = [Answer() for _ in sends]
                self.answers += self.last
                await _round(sends, self.last, self._door, until)
                self.is_over = time.monotonic() >= until
                if self.is_over:
                    break
                sends = self._rounds.send(self.last)
        except StopIteration:
            pass
        finally:
            self._rounds.close()

    @property
    def problem(self) -> str:
        """What is wrong with the answers; empty: nothing. Any 4xx and a proper 200 are right."""
        attack = self._attack
        for answer in self.answers:
            is_full = attack.is_flood and answer.status == 503 and "retry-after" in answer.headers
            if answer.status >= 500 and not is_full:
                return f"status {answer.status}: {answer.body[:120].decode(errors='replace')}"
            is_lost = answer.waited and answer.is_closed and answer.status == 0 and answer.was_all_sent
            if is_lost and not attack.is_flood:
                return "the connection was closed without an answer"
        if attack.check is None:
            return ""
        if self.is_over and not all(answer.status for answer in self.last):
            return f"no answer within {attack.seconds:g} s"
        return attack.check(self.last, self._door)


async def _round(sends: Sequence[Send], answers: Sequence[Answer], door: Door, until: float) -> None:
    tasks = [
        asyncio.create_task(_connection(send, answer, door, until)) for send, answer in zip(sends, answers, strict=True)
    ]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, until - time.monotonic()))
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _connection(send: Send, answer: Answer, door: Door, until: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(send.delay)
    with socket.socket() as connection:
        connection.setblocking(False)
        if send.receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, send.receive_buffer)
        try:
            await loop.sock_connect(connection, ("127.0.0.1", door.port))
        except OSError:
            answer.is_closed = True
            return
        answer.waited = send.then in ("answer", "drain")
        began = time.monotonic()
        # The server may answer before it has everything: reading goes on beside sending.
        reading = asyncio.create_task(_read(connection, answer, send.then == "drain")) if answer.waited else None
        sending = asyncio.create_task(_write(connection, send, answer))
        try:
            if reading is None:
                await sending
                if send.then == "hold":
                    await asyncio.sleep(max(0.0, until - time.monotonic()))
            else:
                await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
                await reading
        finally:
            answer.seconds = time.monotonic() - began
            tasks = [task for task in (reading, sending) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if send.then == "reset":
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _write(connection: socket.socket, send: Send, answer: Answer) -> None:
    loop = asyncio.get_running_loop()
    try:
        for piece in send.pieces:
            view = memoryview(piece)
            for at in range(0, len(view), _SLICE):
                await loop.sock_sendall(connection, view[at : at + _SLICE])
                answer.num_sent += len(view[at : at + _SLICE])
            if send.pause:
                await asyncio.sleep(send.pause)
        answer.was_all_sent = True
        if send.shuts:
            connection.shutdown(socket.SHUT_WR)
    except OSError:  # the server has closed: what it said before that is still read
        pass


async def _read(connection: socket.socket, answer: Answer, drains: bool) -> None:
    """Read one response, or with `drains` everything until the server closes; the first response is kept."""
    loop = asyncio.get_running_loop()
    held, is_open = b"", True

    async def more() -> bytes:
        nonlocal is_open
        try:
            data = await loop.sock_recv(connection, _SLICE)
        except OSError:
            data = b""
        is_open = bool(data)
        return data

    while True:
        while b"\r\n\r\n" not in held and len(held) < _MAX_HEAD and is_open:
            held += await more()
        head, found, held = held.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        parts = lines[0].split(None, 2)
        if not found or len(parts) < 2 or not parts[1].isdigit():
            answer.is_closed = True
            return
        answer.status = int(parts[1])
        if answer.status != 100:
            break
    named = (line.decode("latin-1").partition(":") for line in lines[1:])
    answer.headers = {name.strip().lower(): value.strip() for name, _, value in named}
    is_chunked = "chunked" in answer.headers.get("transfer-encoding", "")
    length = answer.headers.get("content-length", "")
    wanted = int(length) if length.isdigit() and not is_chunked else None
    kept, num_read, tail = bytearray(held[:_KEPT]), len(held), held[-5:]
    while is_open:
        if not drains and ((wanted is not None and num_read >= wanted) or (is_chunked and tail.endswith(b"0\r\n\r\n"))):
            break
        data = await more()
        num_read += len(data)
        tail = (tail + data)[-5:]
        if len(kept) < _KEPT:
            kept += data
    answer.body = bytes(kept[:wanted] if wanted is not None else kept)
    answer.is_closed = not is_open and not drains and wanted is not None and num_read < wanted
