"""Every line of a batch to its record, so many at once and no more.
Knows nothing of files, of processes or of what a line asks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from octavo.server.batch.lines import BadLine, Line
from octavo.server.batch.records import Record, answer_record, bad_line_record
from octavo.server.state.loopback import LoopbackResponse

MAX_PAUSE_SECONDS = 30
LOOK_SECONDS = 0.05  # how often a line that stands aside looks whether it may go
BREATH = 256  # lines that were answered before, after which others get their turn

Ask = Callable[[str, bytes], Awaitable[LoopbackResponse]]
Write = Callable[[Record], Awaitable[None]]


async def answer_lines(
    lines: Iterable[Line | BadLine | None],
    ask: Ask,
    slots: asyncio.Semaphore,
    write: Write,
    is_crowded: Callable[[], bool] = lambda: False,
) -> None:
    """`slots`: how many may be under way, here and wherever else the same slots are used, in turn. While others wait for the
    engine (`is_crowded`) one of ours is enough. None among the lines: one that was answered before. Records are written as
    answers come. An exception, of `write` for one, ends all."""
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
                            slots.release()  # nobody is under way who would
                            raise
                        task = group.create_task(_answer(line, ask, write))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                        # Not by the task itself: one that is cancelled before its first step does nothing at all.
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
        # Nobody is waiting for this one: it comes back when there is room, or an engine, again.
        await asyncio.sleep(min(answer.retry_after or 1, MAX_PAUSE_SECONDS))
        answer = await ask(line.url, line.body)
    await write(answer_record(line, answer))
