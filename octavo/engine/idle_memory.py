"""IdleMemory: decides how much memory idle prefixes may keep on a CPU. While memory is scarce it halves them every second; when it has not been
for a while, they may grow again. The loop hands a new limit to the cache between two steps, and observers hear of it: what steers a
plan is an input on record (decisions 023, 047)."""

import time
from collections.abc import Callable

from octavo.cache import PagePool
from octavo.ipc.memory_pressure import MemoryReading, read_memory

PERIOD_SECONDS = 1.0
CALM_SECONDS = 60.0  # without scarcity, before idle prefixes may grow again
LEAST_SHARE, LEAST_BYTES = 0.05, 256 * 2**20  # memory is scarce when less than the larger of the two is available
MOST_STALLED = 10.0  # … or tasks waited for it in so many percent of the last 10 s
FLOOR_BYTES = 192 * 2**20  # idle prefixes keep so much in any case


def is_scarce(reading: MemoryReading) -> bool:
    least = min(max(LEAST_SHARE * reading.total, LEAST_BYTES), reading.total / 2)
    return reading.available < least or reading.stalled >= MOST_STALLED


class IdleMemory:
    def __init__(
        self,
        pool: PagePool,
        page_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], MemoryReading | None] = read_memory,
    ) -> None:
        """`pool`: its present limit is the most that prefixes may keep."""
        self._pool, self._clock, self._read = pool, clock, read
        self._most = pool.num_warm
        self._floor = min(self._most, -(-FLOOR_BYTES // max(1, page_bytes)))
        self._next = clock()
        self._scarce_at = self._next - CALM_SECONDS
        self.num_given_back = 0  # pages, since the start

    def take(self) -> int | None:
        """The new limit of touched pages, to be given to the pool. None: it stays. Reads the system's numbers once a second."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + PERIOD_SECONDS
        pool = self._pool
        if self._most <= self._floor or (reading := self._read()) is None:
            return None
        if is_scarce(reading):
            self._scarce_at = now
            idle = pool.num_touched - pool.num_used
            limit = max(self._floor, pool.num_used + idle // 2)
            return limit if limit < min(pool.num_warm, pool.num_touched) else None
        if pool.num_warm < self._most and now - self._scarce_at >= CALM_SECONDS:
            self._scarce_at = now  # the next part after as long a pause
            return min(self._most, pool.num_warm + max(1, self._most // 4))
        return None
