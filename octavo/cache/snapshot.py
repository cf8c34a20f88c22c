"""A cache's state as plain values, and back: what is told of a cache that goes on, to one that shall do the same from here on.
Knows nothing of files, or of who asks."""

from collections import Counter, OrderedDict, deque

import msgspec

from octavo.cache.kv_cache import KVCache, PageTable


class TableState(msgspec.Struct, array_like=True, gc=False):
    first: int
    found: int
    pages: list[int]


class CacheState(msgspec.Struct, array_like=True, gc=False):
    """What the constructor is not told. How often a page is owned follows from the tables."""

    tables: dict[int, list[TableState]]
    host_tables: dict[int, list[TableState]]
    host_free: list[int]
    published: dict[int, tuple[int, bytes]]
    blank: list[int]  # in the order in which they will be taken
    cached: list[int]  # … in which they will be evicted
    keys: dict[int, bytes]  # page → key
    num_touched: int
    queried_tokens: int
    hit_tokens: int


def take(cache: KVCache) -> CacheState:
    """To be encoded at once: parts of it belong to the cache. The cache forgets the queue's head's keys, for who goes on from
    here has to make them too."""
    cache._head = (-1, 0, [])
    pool = cache.pool
    return CacheState(
        {sequence: _told(tables) for sequence, tables in cache.tables.items()},
        {sequence: _told(tables) for sequence, tables in cache.host_tables.items()},
        cache.host_free,
        cache._published,
        list(pool.blank),
        list(pool.cached),
        {page: key for key, page in pool.index.items()},
        pool.num_touched,
        cache.queried_tokens,
        cache.hit_tokens,
    )


def restore(cache: KVCache, state: CacheState) -> None:
    """Into a fresh cache, made with the same numbers."""
    pool = cache.pool
    cache.tables = {sequence: _tables(tables) for sequence, tables in state.tables.items()}
    cache.host_tables = {sequence: _tables(tables) for sequence, tables in state.host_tables.items()}
    cache.host_free = list(state.host_free)
    cache._published = dict(state.published)
    cache.queried_tokens, cache.hit_tokens = state.queried_tokens, state.hit_tokens
    pool.blank, pool.cached = deque(state.blank), OrderedDict.fromkeys(state.cached)
    pool.num_touched = state.num_touched
    for page, key in state.keys.items():
        pool.keys[page], pool.index[key] = key, page
    owned = Counter(page for tables in cache.tables.values() for table in tables for page in table.pages)
    for page, count in owned.items():
        pool.refs[page] = count


def _told(tables: list[PageTable]) -> list[TableState]:
    return [TableState(table.first, table.found, table.pages) for table in tables]


def _tables(states: list[TableState]) -> list[PageTable]:
    tables = []
    for state in states:
        table = PageTable(state.first, list(state.pages))
        table.found = state.found
        tables.append(table)
    return tables
