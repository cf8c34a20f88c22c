"""Runs large work in a thread: on the event loop it would hold up every other stream of this process.

A thread yields the GIL every few milliseconds while it runs Python; a long call into C does not. The work is therefore to be
done item by item."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

LONG_LIST = 4_000
"""Items (tokens or logprobs): smaller work is done faster than a thread starts."""

_encode = msgspec.json.Encoder().encode


async def offload(size: int, work: Callable[[], T]) -> T:
    """Run `work`, which is about `size` items, and return its result."""
    return await asyncio.to_thread(work) if size > LONG_LIST else work()


def one_of(size: int, item: T) -> T:
    """An item of a list of `size` to be encoded as JSON. Items of a long list are encoded here: they are then neither kept as
    objects, which the garbage collector would traverse, nor encoded in one call."""
    encoded: Any = msgspec.Raw(_encode(item)) if size > LONG_LIST else item
    return cast(T, encoded)
