"""Work on files that must not be left half done: in a thread, which is waited for even where its task is cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from octavo.server.state.pools import BATCHES

T = TypeVar("T")


async def finish_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run `work` in a thread. Unlike with BATCHES.run, it is over when this returns or raises, also by cancellation: what
    follows may change the same file."""
    working = BATCHES.submit(work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise
