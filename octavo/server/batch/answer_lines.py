"""Answers the lines of a batch, a bounded number at once, and writes a record for each."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from octavo.server.batch.lines import BadLine, Line
from octavo.server.batch.records import Record, answer_record, bad_line_record
from octavo.server.state.loopback import LoopbackResponse

MAX_PAUSE_SECONDS = 30
CHECK_SECONDS = 0.05  # how often a waiting line checks whether the engine is still crowded
YIELD_EVERY = 256  # lines after which other tasks get to run: lines answered earlier never await

Ask = Callable[[str, bytes], Awaitable[LoopbackResponse]]
Write = Callable[[Record], Awaitable[None]]


async def answer_lines(
    lines: Iterable[Line | BadLine | None],
    ask: Ask,
    slots: asyncio.Semaphore,
    write: Write,
    is_crowded: Callable[[], bool] = lambda: False,
) -> None:
    """Ask for every line and write its record as the answer arrives. `slots` bounds the lines in flight; batches that run at the
    same time share it. While other requests wait for the engine (`is_crowded`), only one line of this batch is in flight. None
    among the lines: answered earlier. An exception, for example of `write`, ends all."""
    in_flight: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group:
            for number, line in enumerate(lines):
                match line:
                    case Line():
                        await slots.acquire()
                        try:
                            await _wait_while_crowded(in_flight, is_crowded)
                        except BaseException:
                            slots.release()  # there is no task yet that would
                            raise
                        task = group.create_task(_answer(line, ask, write))
                        in_flight.add(task)
                        task.add_done_callback(in_flight.discard)
                        # Not inside the task: a task that is cancelled before its first step never runs.
                        task.add_done_callback(lambda _: slots.release())
                    case BadLine():
                        await write(bad_line_record(line))
                if number % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first ended the others


async def _wait_while_crowded(in_flight: set[asyncio.Task[None]], is_crowded: Callable[[], bool]) -> None:
    while in_flight and is_crowded():
        await asyncio.wait(in_flight, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)


async def _answer(line: Line, ask: Ask, write: Write) -> None:
    answer = await ask(line.url, line.body)
    while answer.status == 503 or (answer.status == 429 and not line.limits_its_wait):
        # No client waits for this line: retry once there is room in the queue, or an engine, again.
        await asyncio.sleep(min(answer.retry_after or 1, MAX_PAUSE_SECONDS))
        answer = await ask(line.url, line.body)
    await write(answer_record(line, answer))
