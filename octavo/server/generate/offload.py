"""Work in bulk, done in a thread: on the event loop it would hold up every other stream of this process.
Knows nothing of what the work is.

A thread gives way every few milliseconds as long as it runs Python; one call into C that takes long holds up everybody all the same.
Whoever works here does it item by item."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

LONG_LIST = 4_000
"""Items, of tokens or their logprobs, beyond which it is bulk: all the others are done at once, sooner than a thread would begin."""

_encode = msgspec.json.Encoder().encode


async def offload(size: int, work: Callable[[], T]) -> T:
    """What `work` gives; it has to do with `size` items."""
    return await asyncio.to_thread(work) if size > LONG_LIST else work()


def one_of(size: int, item: T) -> T:
    """An item of a list of `size` that is to be encoded. One of a long list is encoded already: many are then neither kept as objects,
    which the collector would have to walk through, nor encoded in one go."""
    encoded: Any = msgspec.Raw(_encode(item)) if size > LONG_LIST else item
    return cast(T, encoded)
