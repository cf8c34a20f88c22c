"""A cache's state as plain values, and back: a second cache restored from it behaves like the first from then on."""

from collections import Counter, deque

import msgspec

from octavo.cache.eviction import IdleState
from octavo.cache.kv_cache import KVCache, PageTable


class TableState(msgspec.Struct, array_like=True, gc=False):
    first: int
    found: int
    pages: list[int]


class CacheState(msgspec.Struct, array_like=True, gc=False):
    """State beyond the constructor's arguments. Reference counts follow from the tables."""

    tables: dict[int, list[TableState]]
    host_tables: dict[int, list[TableState]]
    host_free: list[int]
    published: dict[int, tuple[int, bytes]]
    blank: list[int]  # in the order in which they will be taken
    cached: list[int]  # in the order in which they will be evicted
    keys: dict[int, bytes]  # page → key
    num_touched: int
    queried_tokens: int
    hit_tokens: int
    loads: dict[int, list[int]] = {}
    num_warm: int = -1  # −1: as the constructor was given; recordings from before decision 047 do not have it
    roots: dict[int, bytes] = {}  # recordings from before decision 052 do not have them
    idle: IdleState | None = (
        None  # None: recordings from before decision 057, whose cached pages were evicted in one order
    )


def take(cache: KVCache) -> CacheState:
    """Snapshot the cache. Encode the result at once: it shares lists with the cache. The cache drops the remembered keys of the
    queue's head, because a restored cache computes them again too, and both must record the same keys."""
    cache._head = (-1, 0, [])
    pool = cache.pool
    return CacheState(
        {sequence: _states_of(tables) for sequence, tables in cache.tables.items()},
        {sequence: _states_of(tables) for sequence, tables in cache.host_tables.items()},
        cache.host_free,
        cache._published,
        list(pool.blank),
        list(pool.cached),
        {page: key for key, page in pool.index.items()},
        pool.num_touched,
        cache.queried_tokens,
        cache.hit_tokens,
        cache.loads,
        pool.num_warm,
        cache._roots,
        pool.cached.state(),
    )


def restore(cache: KVCache, state: CacheState) -> None:
    """Restore a snapshot into a fresh cache that was built with the same arguments."""
    pool = cache.pool
    cache.tables = {sequence: _tables_of(tables) for sequence, tables in state.tables.items()}
    cache.host_tables = {sequence: _tables_of(tables) for sequence, tables in state.host_tables.items()}
    cache.host_free = list(state.host_free)
    cache.loads = {ticket: list(pages) for ticket, pages in state.loads.items()}
    cache._published, cache._roots = dict(state.published), dict(state.roots)
    cache.queried_tokens, cache.hit_tokens = state.queried_tokens, state.hit_tokens
    pool.blank = deque(state.blank)
    pool.cached.restore(state.idle or IdleState([], state.cached, [], [], [], [], [], 0.0, 0, False))
    pool.num_touched = state.num_touched
    if state.num_warm >= 0:
        pool.num_warm = pool.cached.capacity = state.num_warm
    for page, key in state.keys.items():
        pool.keys[page], pool.index[key] = key, page
    owned = Counter(page for tables in cache.tables.values() for table in tables for page in table.pages)
    owned.update(page for pages in cache.loads.values() for page in pages)
    for page, count in owned.items():
        pool.refs[page] = count


def _states_of(tables: list[PageTable]) -> list[TableState]:
    return [TableState(table.first, table.found, table.pages) for table in tables]


def _tables_of(states: list[TableState]) -> list[PageTable]:
    tables = []
    for state in states:
        table = PageTable(state.first, list(state.pages))
        table.found = state.found
        tables.append(table)
    return tables
