"""Values that every request gets anew: ids, seeds, the time. A request that is made again, because the process that made it has ended, gets the
same ones from a Source."""

import os
import time
from contextvars import ContextVar
from hashlib import blake2b


class Source:
    """Values that follow from a key: equal keys give equal values, in the order in which they are asked for."""

    def __init__(self, key: bytes, now: float, attempt: str = "") -> None:
        """`attempt`: tells what is made again from what was made first, where the two must not be taken for one another. Empty: it is the first."""
        self.key, self.now, self.attempt = key, now, attempt
        self._count = 0

    def take(self, num_bytes: int) -> bytes:
        self._count += 1
        return blake2b(self._count.to_bytes(8), key=self.key, digest_size=num_bytes).digest()


current: ContextVar[Source | None] = ContextVar("fresh", default=None)
"""None: values are random, and the time is now."""


def new_source() -> Source:
    return Source(os.urandom(32), time.time())


def random_bytes(num_bytes: int) -> bytes:
    source = current.get()
    return os.urandom(num_bytes) if source is None else source.take(num_bytes)


def random_seed() -> int:
    """63 bits."""
    return int.from_bytes(random_bytes(8)) >> 1


def now() -> float:
    """Seconds since 1970 at which the request came."""
    source = current.get()
    return time.time() if source is None else source.now
