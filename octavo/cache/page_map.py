"""What every page is, at one look: free, cached, shared, or whose. For those who watch, a few times a second.
Knows nothing of requests: owners are sequences, as everywhere in this room."""

from array import array
from itertools import repeat

from octavo.cache.kv_cache import KVCache

FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3
NUM_OWNERS = 2**16 - FIRST_OWNER


def owner_code(sequence: int) -> int:
    """How a sequence is written in the map. It stays the same for as long as the sequence lives."""
    return FIRST_OWNER + sequence % NUM_OWNERS


def page_map(cache: KVCache) -> "array[int]":
    """A code for each page. Costs a few dozen nanoseconds a page, owned or not."""
    pool = cache.pool
    codes = array("H", map(min, pool.refs, repeat(SHARED)))  # 0 free, 1 owned, 2 shared
    for sequence, tables in cache.tables.items():
        code = owner_code(sequence)
        for table in tables:
            for page in table.pages:
                if codes[page] != SHARED:
                    codes[page] = code
    for page in pool.cached:
        codes[page] = CACHED
    return codes


def owners_of(cache: KVCache, page: int) -> list[int]:
    """Every sequence that holds the page."""
    return [sequence for sequence, tables in cache.tables.items() if any(page in table.pages for table in tables)]
