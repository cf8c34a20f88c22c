"""Fresh: one answer for all that ask at the same time, and for a while after."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SOON_SECONDS = 0.1


class Fresh(Generic[T]):
    """`ask` is called by one of those that want its answer; the others get the same one. An answer counts for `fresh` seconds. Up to `stale`
    seconds it counts if the next one takes longer than SOON_SECONDS: a slow answer keeps no one waiting."""

    def __init__(self, ask: Callable[[], Awaitable[T]], fresh: float, stale: float = 0.0) -> None:
        self._ask, self._fresh, self._stale = ask, fresh, stale
        self._answer: T | None = None
        self._answered = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> T:
        age = time.monotonic() - self._answered
        if age >= self._fresh:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._renew())
            if age >= self._stale or self._asking in (await asyncio.wait({self._asking}, timeout=SOON_SECONDS))[0]:
                await asyncio.shield(self._asking)
        assert self._answer is not None
        return self._answer

    async def _renew(self) -> None:
        self._answer = await self._ask()
        self._answered = time.monotonic()
