"""Idle prefixes use the whole KV store, and give memory back while it is scarce."""

from octavo.cache import KVCache, audit
from octavo.engine.idle_memory import CALM_SECONDS, FLOOR_BYTES, IdleMemory, is_scarce
from octavo.ipc.memory_pressure import MemoryReading

GiB = 2**30
PAGE_BYTES = -(-FLOOR_BYTES // 10)  # ten pages are always left
CALM, SCARCE = MemoryReading(4 * GiB, 16 * GiB, 0.0), MemoryReading(GiB // 8, 16 * GiB, 0.0)


def idle_cache(num_pages: int, num_idle: int) -> KVCache:
    cache = KVCache(num_pages, 1, num_warm_pages=num_pages)
    tokens = list(range(num_idle))
    cache.admit(1, tokens)
    cache.publish(1, tokens, num_idle)
    cache.release(1)
    return cache


def test_scarcity_is_little_memory_or_waiting_for_it():
    assert not is_scarce(CALM)
    assert is_scarce(SCARCE)
    assert is_scarce(CALM._replace(stalled=12.0))
    assert not is_scarce(MemoryReading(150 * 2**20, 200 * 2**20, 0.0)), (
        "a small machine is not scarce of memory by its size"
    )


def test_idle_prefixes_are_halved_every_second_while_memory_is_scarce_and_grow_again_later():
    cache, now, reading = idle_cache(100, 80), [0.0], [CALM]
    memory = IdleMemory(cache.pool, PAGE_BYTES, lambda: now[0], lambda: reading[0])

    def limit_after(seconds: float) -> int | None:
        now[0] += seconds
        limit = memory.take()
        if limit is not None:
            given = cache.pool.limit_touched(limit)
            assert cache.pool.num_touched <= max(limit, cache.pool.num_used), "the rest has memory no more"
            assert set(given) <= set(cache.pool.blank)
            assert not audit(cache)
        return limit

    assert limit_after(0) is None and cache.pool.num_touched == 80
    reading[0] = SCARCE
    assert limit_after(0.5) is None, "once a second"
    assert [limit_after(1) for _ in range(4)] == [40, 20, 10, None]
    assert len(cache.pool.cached) == 10
    reading[0] = CALM
    assert limit_after(CALM_SECONDS - 2) is None
    assert [limit_after(CALM_SECONDS) for _ in range(5)] == [35, 60, 85, 100, None]


def test_running_requests_keep_their_pages_however_scarce_memory_is():
    cache = KVCache(40, 1, num_warm_pages=40)
    cache.admit(1, list(range(30)))
    assert cache.pool.limit_touched(5) == [] and cache.pool.num_touched == 30
    assert cache.admit(2, list(range(40, 48))) is not None, "and others get pages beyond the limit"
    cache.release(1)
    assert len(cache.pool.limit_touched(5)) == 30 and cache.pool.num_touched == 8
    assert not audit(cache)


def test_without_numbers_from_the_system_nothing_is_limited():
    memory = IdleMemory(idle_cache(100, 80).pool, PAGE_BYTES, lambda: 0.0, lambda: None)
    assert memory.take() is None
