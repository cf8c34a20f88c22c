"""The body of a request as it arrives: its limits of size and time, and those of all bodies together; compressed ones are inflated."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import Message, Receive, Scope

from octavo.errors import EngineUnavailable, Overloaded, RequestTimeout, TooLarge
from octavo.ipc.launch import Patience
from octavo.server.http.inflate import Inflater, inflater_for
from octavo.server.state.disconnect import DRAIN_RETRY_AFTER
from octavo.server.state.loopback import INSIDE

SMALL_BODY = 64 * 2**10  # bytes: bodies of this size are taken however many bytes others have sent
BODIES_RETRY_AFTER = 2
BODY_STEP = 1024  # bytes of a body that must arrive within the time limit, unless the body is complete


class BodyLimits:
    """The limits of all bodies of a process."""

    def __init__(self, max_body_bytes: int, max_bodies_bytes: int, by_route: Mapping[str, int]) -> None:
        """`by_route`: of routes that take more than `max_body_bytes`, and write it to the disk as it comes."""
        self._max_body_bytes, self._max_bodies_bytes, self._by_route = max_body_bytes, max_bodies_bytes, by_route
        self._num_bytes = 0  # of all bodies whose responses have not begun

    def check_length(self, scope: Scope, route: str, num_bytes: int, what: str = "the request body") -> None:
        """Raises TooLarge."""
        if num_bytes <= self._max_body_bytes or INSIDE in scope:
            return
        limit = self._by_route.get(route, self._max_body_bytes)
        if num_bytes > limit:
            flag = "--max-body-bytes" if limit == self._max_body_bytes else "--max-file-bytes"
            raise TooLarge(f"{what} is over the limit of {limit} bytes ({flag})")

    def count(self, scope: Scope, route: str, num_bytes: int, num_body_bytes: int) -> int:
        """Count `num_bytes` more of a body that has `num_body_bytes` by now. → the bytes counted, for `release`. Raises
        Overloaded if all bodies together are too large."""
        if INSIDE in scope or route in self._by_route:
            return 0
        if num_body_bytes > SMALL_BODY and self._num_bytes + num_bytes > self._max_bodies_bytes:
            raise Overloaded(
                f"the bodies of requests in progress take {self._num_bytes} bytes, and this one would exceed the limit of "
                f"{self._max_bodies_bytes} (--max-bodies-bytes)",
                BODIES_RETRY_AFTER,
            )
        self._num_bytes += num_bytes
        return num_bytes

    def release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class BodyHost(Protocol):
    """The server, as far as its bodies are concerned."""

    draining: bool
    patience: Patience

    def arriving(self, limit: asyncio.Timeout) -> contextlib.AbstractContextManager[None]:
        """Have the time limit of a body shortened when the server begins to drain."""


class BodyReader:
    """One request's body, for an ASGI application: `receive` takes the place of the server's."""

    def __init__(
        self,
        scope: Scope,
        route: str,
        receive: Receive,
        limits: BodyLimits,
        host: BodyHost,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._scope, self._route, self._receive = scope, route, receive
        self._limits, self._host, self._on_complete = limits, host, on_complete
        self._num_bytes = 0
        self._num_held_bytes = 0  # as the limits of all bodies count them
        self._is_complete = False
        self._inflater: Inflater | None = None  # None: the body is not compressed
        # Seconds waited for the next BODY_STEP bytes, and how many of them have arrived.
        self._waited, self._num_late_bytes = 0.0, 0
        self._patience = host.patience.request

    def expect(self, length: str, encoding: str) -> None:
        """`length`, `encoding`: the headers Content-Length and Content-Encoding, or empty. Raises TooLarge or UnsupportedEncoding."""
        if length.isascii() and length.isdigit():
            self._limits.check_length(self._scope, self._route, int(length))
        if encoding and self._scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            self._inflater = inflater_for(encoding)

    async def receive(self) -> Message:
        if self._inflater is None or self._inflater.is_over:
            return await self._receive_as_sent()
        return await self._receive_inflated(self._inflater)

    def release(self) -> None:
        """Count the body no longer: it is parsed, or not read further."""
        self._limits.release(self._num_held_bytes)
        self._num_held_bytes = 0

    def _hold(self, num_bytes: int, num_body_bytes: int) -> None:
        self._num_held_bytes += self._limits.count(self._scope, self._route, num_bytes, num_body_bytes)

    async def _receive_inflated(self, inflater: Inflater) -> Message:
        while True:
            piece = inflater.take()
            self._limits.check_length(self._scope, self._route, inflater.num_bytes, "the request body, inflated,")
            if piece or inflater.is_over:
                self._hold(len(piece), inflater.num_bytes)
                await asyncio.sleep(0)  # other requests have their turn between two pieces
                return {"type": "http.request", "body": piece, "more_body": not inflater.is_over}
            message = await self._receive_as_sent()
            if message["type"] != "http.request":
                return message
            inflater.feed(message.get("body", b""), is_last=not message.get("more_body", False))

    async def _receive_as_sent(self) -> Message:
        message = await self._receive() if self._is_complete else await self._receive_in_time()
        if message["type"] == "http.request":
            num_bytes = len(message.get("body", b""))
            self._num_bytes += num_bytes
            self._limits.check_length(self._scope, self._route, self._num_bytes)
            self._hold(num_bytes, self._num_bytes)
            self._num_late_bytes += num_bytes
            if self._num_late_bytes >= BODY_STEP:
                self._waited, self._num_late_bytes = 0.0, 0
            if not message.get("more_body", False):
                self._is_complete = True
                self._on_complete()
        return message

    async def _receive_in_time(self) -> Message:
        """Receive with a time limit, which is short once the server stops. Time spent on processing does not count."""
        began, host = time.monotonic(), self._host
        if host.draining and self._patience > (farewell := host.patience.farewell):
            self._patience, self._waited = farewell, 0.0
        try:
            async with asyncio.timeout(self._patience - self._waited) as limit:
                with host.arriving(limit):
                    return await self._receive()
        except TimeoutError:
            if host.draining:
                raise EngineUnavailable(
                    "the server is shutting down, and the request body has not arrived", DRAIN_RETRY_AFTER
                ) from None
            raise RequestTimeout(
                f"the request body did not arrive in time: fewer than {BODY_STEP} bytes within {self._patience:g} s"
            ) from None
        finally:
            self._waited += time.monotonic() - began
