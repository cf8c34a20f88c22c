"""while_connected: runs work for the HTTP request of this task, until it is done or the client has disconnected."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.types import Receive

from octavo.errors import EngineUnavailable

T = TypeVar("T")

DRAIN_RETRY_AFTER = 5
"""Seconds after which a client of a draining server should find its successor."""

receiving: ContextVar[Receive | None] = ContextVar("octavo receive", default=None)
"""How to receive from the client whose HTTP request this task serves; the middleware sets it. None: there is no client."""


class ClientGone(Exception):
    """The client closed its connection: no response can be sent."""


async def while_connected(work: Coroutine[Any, Any, T], track: Callable[["asyncio.Task[T]"], None] | None = None) -> T:
    """Run `work` and return its result. If the client disconnects first, cancel it and raise ClientGone. The request's body must
    have been read. `track`: is handed the task that runs it (Service.track), which may be cancelled: then raises cut_off()."""
    receive = receiving.get()
    if receive is None:
        return await work
    task = asyncio.create_task(work)
    if track is not None:
        track(task)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        if task.cancelled():
            raise cut_off()
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def cut_off() -> EngineUnavailable:
    return EngineUnavailable("the server shut down before this response was complete", DRAIN_RETRY_AFTER)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
