"""A snapshot of every page's state: free, cached, held, loading, shared, or the sequence that owns it. The live views read it a few times a
second."""

from array import array
from itertools import repeat

from octavo.cache.kv_cache import KVCache

FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3
LOADING, HELD = 2**16 - 2, 2**16 - 1  # being filled from a tier; cached, and evicted last because a client asked for it
NUM_OWNERS = LOADING - FIRST_OWNER


def owner_code(sequence: int) -> int:
    """The sequence's code in the map. It is the same for as long as the sequence lives."""
    return FIRST_OWNER + sequence % NUM_OWNERS


def page_map(cache: KVCache) -> "array[int]":
    """Return one code per page. Costs a few dozen nanoseconds per page, owned or not."""
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
    if pool.cached.keep:
        for page in pool.cached.kept():
            codes[page] = HELD
    for pages in cache.loads.values():
        for page in pages:
            if codes[page] == CACHED:  # one reference, and no sequence has it
                codes[page] = LOADING
    return codes


def owners_of(cache: KVCache, page: int) -> list[int]:
    """Sequences that hold the page."""
    return [sequence for sequence, tables in cache.tables.items() if any(page in table.pages for table in tables)]
