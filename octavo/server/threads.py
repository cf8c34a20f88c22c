"""Pool: a named group of threads for work that would hold up the event loop, bounded in threads and in work that waits.

asyncio's own executor has neither bound, and is shared: a few slow requests would hold up everything that uses it."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from octavo.errors import Overloaded

T = TypeVar("T")

RETRY_SECONDS = 1


class Pool:
    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """`max_waiting`: work beyond that which runs; more is refused with Overloaded. `name`: what the pool does, for errors."""
        self._name = name
        self._most = num_threads + max_waiting
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, f"octavo-{name}")
        self._num_open = 0  # running or waiting; a thread changes it, too
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        return self._num_open

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in a thread, with the caller's context. If the caller is cancelled, work that waits is dropped; work that
        runs ends by itself, and counts until then."""
        return await self.submit(work, *arguments)

    def submit(self, work: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """As run(), for callers that wait in their own way."""
        with self._lock:
            if self._num_open >= self._most:
                raise Overloaded(
                    f"this process already has {self._max_waiting} requests waiting for {self._name}", RETRY_SECONDS
                )
            self._num_open += 1
        future: Future[T] = self._threads.submit(contextvars.copy_context().run, work, *arguments)
        future.add_done_callback(self._ended)
        return asyncio.wrap_future(future)

    def _ended(self, future: "Future[Any]") -> None:
        with self._lock:
            self._num_open -= 1
