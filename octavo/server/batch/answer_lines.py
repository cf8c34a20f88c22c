"""Answers the lines of a batch, a bounded number at once, and writes a record for each."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from octavo.server.batch.lines import BadLine, Line
from octavo.server.batch.records import Record, answer_record, bad_line_record
from octavo.server.state.loopback import Answer

MAX_PAUSE_SECONDS = 30
LOOK_SECONDS = 0.05  # how often a waiting line checks whether the engine is still crowded
BREATH = 256  # lines after which other tasks get to run: lines answered earlier never await

Ask = Callable[[str, bytes], Awaitable[Answer]]
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
    under_way: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group:
            for number, line in enumerate(lines):
                match line:
                    case Line():
                        await slots.acquire()
                        try:
                            await _stand_aside(under_way, is_crowded)
                        except BaseException:
                            slots.release()  # there is no task yet that would
                            raise
                        task = group.create_task(_answer(line, ask, write))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                        # Not inside the task: a task that is cancelled before its first step never runs.
                        task.add_done_callback(lambda _: slots.release())
                    case BadLine():
                        await write(bad_line_record(line))
                if number % BREATH == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first ended the others


async def _stand_aside(under_way: set[asyncio.Task[None]], is_crowded: Callable[[], bool]) -> None:
    while under_way and is_crowded():
        await asyncio.wait(under_way, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)


async def _answer(line: Line, ask: Ask, write: Write) -> None:
    answer = await ask(line.url, line.body)
    while answer.status == 503 or (answer.status == 429 and not line.waits_no_longer):
        # No client waits for this line: retry once there is room in the queue, or an engine, again.
        await asyncio.sleep(min(answer.retry_after or 1, MAX_PAUSE_SECONDS))
        answer = await ask(line.url, line.body)
    await write(answer_record(line, answer))
