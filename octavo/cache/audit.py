"""Consistency check of the page bookkeeping: every page is in exactly one state, and its reference count matches its holders.
Read-only; it costs a walk over all pages."""

from collections import Counter

from octavo.cache.kv_cache import KVCache

_MOST_NAMED = 4


def audit(cache: KVCache, is_idle: bool = False) -> list[str]:
    """Return a description of every fault; empty: all pages are accounted for. `is_idle`: no sequence is alive, so none may
    hold a page."""
    pool = cache.pool
    holders = Counter(page for tables in cache.tables.values() for table in tables for page in table.pages)
    loading = Counter(page for pages in cache.loads.values() for page in pages)
    holders.update(loading)
    blank, cached, owned = Counter(pool.blank), set(pool.cached), {page for page, refs in enumerate(pool.refs) if refs}
    on_host = Counter(cache.host_free)
    on_host.update(page for tables in cache.host_tables.values() for table in tables for page in table.pages)
    pages = range(pool.num_pages)
    adds_up = len(blank) + len(cached) + len(owned) == pool.num_pages
    num_holders = holders.get  # indexing a Counter is slow where a page has none
    found = [
        ("blank, cached and owned pages do not add up to all pages", not adds_up),
        (
            "not in exactly one state",
            [page for page in pages if (page in blank) + (page in cached) + (page in owned) != 1]
            if not adds_up or blank.keys() | cached | owned != set(pages)
            else [],
        ),
        ("more pages are owned or cached than have memory", pool.num_touched < pool.num_pages - len(pool.blank)),
        ("listed as blank more than once", [page for page, count in blank.items() if count > 1]),
        ("with a wrong reference count", [page for page in pages if pool.refs[page] != num_holders(page, 0)]),
        ("cached without a key", [page for page in cached if pool.keys[page] is None]),
        ("blank with a key", [page for page in blank if pool.keys[page] is not None]),
        ("not found under their key", [page for key, page in pool.index.items() if pool.keys[page] != key]),
        ("of the swap space not accounted for", [page for page in range(cache.num_host_pages) if on_host[page] != 1]),
        ("held when nothing runs", sorted(owned - loading.keys()) if is_idle else []),
        ("sequences are swapped out when nothing runs", cache.host_tables and is_idle),
    ]
    return [_describe(what, which) for what, which in found if which]


def _describe(what: str, which: object) -> str:
    if not isinstance(which, list):
        return what
    names = ", ".join(map(str, which[:_MOST_NAMED]))
    return f"{len(which)} pages {what}: {names}{' …' if len(which) > _MOST_NAMED else ''}"
