"""while_connected: runs work for the HTTP request of this task, until it is done or the client has disconnected."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

receiving: ContextVar[Receive | None] = ContextVar("octavo receive", default=None)
"""How to receive from the client whose HTTP request this task serves. None: there is no client."""


class ClientGone(Exception):
    """The client closed its connection: no response can be sent."""


async def while_connected(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. If the client disconnects first, cancel it and raise ClientGone. The request's body must
    have been read."""
    receive = receiving.get()
    if receive is None:
        return await work
    task = asyncio.create_task(work)
    watch = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
