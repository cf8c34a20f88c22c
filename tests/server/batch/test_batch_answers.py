"""Lines of a batch that are answered: which are asked again, and that whoever is cancelled gives back what it held."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from octavo.server.batch import answer_lines as answers
from octavo.server.batch.answer_lines import answer_lines
from octavo.server.batch.lines import BadLine, Line
from octavo.server.batch.records import Record
from octavo.server.state.loopback import LoopbackResponse


async def test_a_batch_that_is_cancelled_while_it_stands_aside_gives_its_slots_back() -> None:
    slots = asyncio.Semaphore(4)
    line = Line(1, "x", "/v1/completions", b"{}")

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    for _ in range(3):
        task = asyncio.create_task(answer_lines([line] * 9, never, slots, never, lambda: True))
        async with asyncio.timeout(10):
            while slots._value != 2:  # one is in flight, one stands aside  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert slots._value == 4


async def test_lines_are_read_in_another_thread() -> None:
    """A line may be as long as a body, and between two lines there may be any number of empty ones."""
    threads: set[threading.Thread] = set()
    written: list[str | None] = []

    def lines() -> Iterator[Line | BadLine | None]:
        for number in range(1000):
            threads.add(threading.current_thread())
            yield Line(number, f"{number}", "/v1/completions", b"{}") if number % 3 else None
        yield BadLine(1000, "bad", "bad")

    async def ask(url: str, body: bytes) -> LoopbackResponse:
        return LoopbackResponse(200, "req-1", None, b"{}")

    async def write(record: Record) -> None:
        written.append(record.custom_id)

    await answer_lines(lines(), ask, asyncio.Semaphore(4), write)
    assert threads and threading.main_thread() not in threads
    assert sorted(map(str, written)) == sorted([str(n) for n in range(1000) if n % 3] + ["None"])


async def test_where_it_is_cancelled_no_thread_reads_on() -> None:
    reading, gate = threading.Event(), threading.Event()
    num_read = 0

    def lines() -> Iterator[None]:
        nonlocal num_read
        while True:
            reading.set()
            gate.wait(10)
            num_read += 1
            yield None

    async def never(*_: object) -> None:
        raise AssertionError

    task = asyncio.create_task(answer_lines(lines(), never, asyncio.Semaphore(4), never))
    await asyncio.to_thread(reading.wait, 10)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done(), "the thread still reads"
    gate.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    num_then = num_read
    await asyncio.sleep(0.02)
    assert num_read == num_then > 0


async def test_a_line_that_says_how_long_it_waits_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_PAUSE_SECONDS", 0)
    asked: list[bytes] = []
    given: dict[str | None, int] = {}

    async def ask(url: str, body: bytes) -> LoopbackResponse:
        asked.append(body)
        return LoopbackResponse(429 if asked.count(body) < 3 else 200, "req-1", 1, b"{}")

    async def write(record: Record) -> None:
        assert record.response is not None
        given[record.custom_id] = record.response.status_code

    bodies = {"patient": b'{"max_queue_ms": null}', "hasty": b'{"prompt": "a", "max_queue_ms": 5}'}
    lines = [Line(at, name, "/v1/completions", body) for at, (name, body) in enumerate(bodies.items())]
    await answer_lines(lines, ask, asyncio.Semaphore(4), write)
    assert given == {"patient": 200, "hasty": 429}
    assert [asked.count(body) for body in bodies.values()] == [3, 1]
