"""Answers the lines of a batch, a bounded number at once, and writes a record for each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator

from octavo.server.batch.lines import BadLine, Line
from octavo.server.batch.records import Record, bad_line_record, response_record
from octavo.server.batch.threads import finish_in_thread
from octavo.server.state.loopback import LoopbackResponse

MAX_PAUSE_SECONDS = 30
CHECK_SECONDS = 0.05  # how often a waiting line checks whether the engine is still crowded
# Lines are read and parsed in a thread, a few at a time: a line may be as long as a request's body.
CHUNK_LINES = 256
CHUNK_BYTES = 2**20  # of their bodies
CHUNK_SECONDS = 0.05

Ask = Callable[[str, bytes], Awaitable[LoopbackResponse]]
Write = Callable[[Record], Awaitable[None]]
Trying = Callable[[Line], contextlib.AbstractContextManager[None]]
"""Entered before a line is asked for the first time, left when its record is written or it is given up."""


async def answer_lines(
    lines: Iterable[Line | BadLine | None],
    ask: Ask,
    slots: asyncio.Semaphore,
    write: Write,
    is_crowded: Callable[[], bool] = lambda: False,
    trying: Trying = lambda line: contextlib.nullcontext(),
) -> None:
    """Ask for every line and write its record as the answer arrives. `slots` bounds the lines in flight; batches that run at the
    same time share it. While other requests wait for the engine (`is_crowded`), only one line of this batch is in flight. None
    among the lines: answered earlier. An exception, for example of `write`, ends all."""
    in_flight: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group, contextlib.aclosing(read_in_thread(lines)) as read:
            async for line in read:
                match line:
                    case Line():
                        await slots.acquire()
                        try:
                            await _wait_while_crowded(in_flight, is_crowded)
                        except BaseException:
                            slots.release()  # there is no task yet that would
                            raise
                        task = group.create_task(_answer(line, ask, write, trying))
                        in_flight.add(task)
                        task.add_done_callback(in_flight.discard)
                        # Not inside the task: a task that is cancelled before its first step never runs.
                        task.add_done_callback(lambda _: slots.release())
                    case BadLine():
                        await write(bad_line_record(line))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first ended the others


async def read_in_thread(lines: Iterable[Line | BadLine | None]) -> AsyncGenerator[Line | BadLine | None, None]:
    """The lines, read in a thread."""
    iterator = iter(lines)
    while True:
        some, is_over = await finish_in_thread(_read_some, iterator)
        for line in some:
            yield line
        if is_over:
            return
        await asyncio.sleep(0)  # also where none of them was awaited


def _read_some(lines: Iterator[Line | BadLine | None]) -> tuple[list[Line | BadLine | None], bool]:
    """Some lines, and whether these are the last. At least one, unless there are no more."""
    some: list[Line | BadLine | None] = []
    num_bytes, until = 0, time.monotonic() + CHUNK_SECONDS
    for line in lines:
        some.append(line)
        num_bytes += len(line.body) if isinstance(line, Line) else 0
        if len(some) == CHUNK_LINES or num_bytes >= CHUNK_BYTES or time.monotonic() >= until:
            return some, False
    return some, True


async def _wait_while_crowded(in_flight: set[asyncio.Task[None]], is_crowded: Callable[[], bool]) -> None:
    while in_flight and is_crowded():
        await asyncio.wait(in_flight, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)


async def _answer(line: Line, ask: Ask, write: Write, trying: Trying) -> None:
    with trying(line):
        response = await ask(line.url, line.body)
        while response.status == 503 or (response.status == 429 and not line.limits_its_wait):
            # No client waits for this line: retry once there is room in the queue, or an engine, again.
            await asyncio.sleep(min(response.retry_after or 1, MAX_PAUSE_SECONDS))
            response = await ask(line.url, line.body)
        await write(response_record(line, response))
