"""Lines of a batch that are answered: whoever is cancelled gives back what it held."""

import asyncio
import contextlib

from octavo.server.batch.answers import answer_lines
from octavo.server.batch.lines import Line


async def test_a_batch_that_is_cancelled_while_it_stands_aside_gives_its_slots_back() -> None:
    slots = asyncio.Semaphore(4)
    line = Line(1, "x", "/v1/completions", b"{}")

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    for _ in range(3):
        task = asyncio.create_task(answer_lines([line] * 9, never, slots, lambda _: None, lambda: True))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert slots._value == 4
