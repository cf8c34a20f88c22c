"""Consistency check of the page bookkeeping: every page is in exactly one state, and its reference count matches its holders.
Read-only; it costs a walk over all pages."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from octavo.cache.kv_cache import KVCache, PageTable

_MOST_NAMED = 4


def audit(cache: KVCache, is_idle: bool = False) -> list[str]:
    """Return a description of every fault; empty: all pages are accounted for. `is_idle`: no sequence is alive, so none may
    hold a page."""
    pool = cache.pool
    refs, keys, blank, cached = pool.refs, pool.keys, {*pool.blank}, {*pool.cached}
    num_pages = pool.num_pages
    num_holders, loading = [0] * num_pages, {*chain.from_iterable(cache.loads.values())}
    unknown: list[int] = []
    for page in chain(_held(cache.tables), chain.from_iterable(cache.loads.values())):
        if 0 <= page < num_pages:
            num_holders[page] += 1
        else:
            unknown.append(page)
    on_host = sorted(chain(cache.host_free, _held(cache.host_tables)))
    # Each list below is made only where it is not empty, as a comparison of whole lists or sets tells: they are long.
    idle, unowned = blank | cached, {page for page, count in enumerate(refs) if not count}
    is_alike = idle == unowned and len(blank) + len(cached) == len(idle)
    found = [
        ("blank, cached and owned pages do not add up to all pages", len(blank) + len(cached) != len(unowned)),
        ("not in exactly one state", [] if is_alike else sorted(idle ^ unowned | blank & cached)),
        ("more pages are owned or cached than have memory", pool.num_touched < num_pages - len(pool.blank)),
        ("listed as blank more than once", _repeated(pool.blank) if len(blank) < len(pool.blank) else []),
        ("with a wrong reference count", [] if refs == num_holders else _unequal(refs, num_holders)),
        ("held that do not exist", unknown),
        ("cached without a key", [page for page in cached if keys[page] is None]),
        ("blank with a key", [page for page in blank if keys[page] is not None]),
        ("not found under their key", [page for key, page in pool.index.items() if keys[page] != key]),
        ("of the swap space not accounted for", _not_once(on_host, cache.num_host_pages)),
        ("held when nothing runs", sorted({*range(num_pages)} - unowned - loading) if is_idle else []),
        ("sequences are swapped out when nothing runs", cache.host_tables and is_idle),
    ]
    return [_describe(what, which) for what, which in found if which]


def _held(tables: dict[int, list[PageTable]]) -> Iterable[int]:
    return chain.from_iterable(table.pages for of_sequence in tables.values() for table in of_sequence)


def _repeated(pages: Iterable[int]) -> list[int]:
    return [page for page, count in Counter(pages).items() if count > 1]


def _unequal(counts: list[int], others: list[int]) -> list[int]:
    return [page for page, (count, other) in enumerate(zip(counts, others, strict=True)) if count != other]


def _not_once(pages: list[int], num_pages: int) -> list[int]:
    """`pages`: sorted."""
    if pages == [*range(num_pages)]:
        return []
    counts = Counter(pages)
    return [page for page in sorted({*range(num_pages), *pages}) if page >= num_pages or counts[page] != 1]


def _describe(what: str, which: object) -> str:
    if not isinstance(which, list):
        return what
    names = ", ".join(map(str, which[:_MOST_NAMED]))
    return f"{len(which)} pages {what}: {names}{' …' if len(which) > _MOST_NAMED else ''}"
