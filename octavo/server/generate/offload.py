"""Runs large work in a thread: on the event loop it would hold up every other stream of this process.

A thread yields the GIL every few milliseconds while it runs Python; a long call into C does not. The work is therefore to be
done item by item."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from octavo.server.threads import Pool

T = TypeVar("T")

LONG_LIST = 4_000
"""Items (tokens or logprobs): smaller work is done faster than a thread starts."""
LONG_TEXT = 20_000
"""Bytes of a request: prompts of longer ones are made in a thread."""

# Few threads: each that runs Python shares the GIL with the event loop, and makes it wait.
PROMPTS = Pool("prompts", num_threads=2, max_waiting=256)
"""Makes prompts: parses messages, renders templates, encodes texts (which releases the GIL)."""
ANSWERS = Pool("answers", num_threads=1, max_waiting=1024)
"""Makes long answers. More may wait than in other pools: their tokens are computed already."""

_encode = msgspec.json.Encoder().encode


async def offload(size: int, work: Callable[[], T]) -> T:
    """Run `work`, which makes an answer of about `size` items, and return its result."""
    return await ANSWERS.run(work) if size > LONG_LIST else work()


async def offload_prompt(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work`, which makes prompts of a request of this size, and return its result."""
    return await PROMPTS.run(work) if num_bytes > LONG_TEXT else work()


def one_of(size: int, item: T) -> T:
    """An item of a list of `size` to be encoded as JSON. Items of a long list are encoded here: they are then neither kept as
    objects, which the garbage collector would traverse, nor encoded in one call."""
    encoded: Any = msgspec.Raw(_encode(item)) if size > LONG_LIST else item
    return cast(T, encoded)
