"""audit: every fault of the page bookkeeping is described, and nothing else."""

from collections.abc import Callable

import pytest

from octavo.cache import KVCache, audit


def cache_in_use() -> KVCache:
    """Pages in every state: shared ones, cached ones, blank ones, some that are being loaded, and a sequence on the host."""
    cache = KVCache(24, 2, num_host_pages=6)
    for sequence, tokens in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7] * 6, [8] * 4)):
        assert cache.admit(sequence, tokens) is not None
        cache.publish(sequence, tokens, len(tokens))
    cache.release(2)
    assert cache.swap_out(3, 4) is not None
    cache.loads[5] = cache.pool.take(2)
    return cache


def repeat_blank(cache: KVCache) -> None:
    cache.pool.blank.append(cache.pool.blank[-1])


def lose_blank(cache: KVCache) -> None:
    cache.pool.blank.pop()


def own_blank(cache: KVCache) -> None:
    cache.pool.refs[cache.pool.blank[-1]] = 1


def cache_blank(cache: KVCache) -> None:
    """Beside being blank, a page is cached."""
    cache.pool.cached.add(cache.pool.blank[-1], b"key")


def share_too_often(cache: KVCache) -> None:
    cache.pool.refs[cache.tables[0][0].pages[0]] += 1


def forget_holder(cache: KVCache) -> None:
    del cache.tables[1]


def hold_what_does_not_exist(cache: KVCache) -> None:
    cache.tables[0][0].pages[0] = 99


def forget_load(cache: KVCache) -> None:
    del cache.loads[5]


def lose_key(cache: KVCache) -> None:
    cache.pool.keys[next(iter(cache.pool.cached))] = None


def keep_key(cache: KVCache) -> None:
    cache.pool.keys[cache.pool.blank[-1]] = b"key"


def find_another(cache: KVCache) -> None:
    cache.pool.index[next(iter(cache.pool.index))] = cache.pool.blank[-1]


def lose_host_page(cache: KVCache) -> None:
    cache.host_free.pop()


def repeat_host_page(cache: KVCache) -> None:
    cache.host_free.append(cache.host_tables[3][0].pages[0])


def forget_memory(cache: KVCache) -> None:
    cache.pool.num_touched = 1


FAULTS: list[tuple[Callable[[KVCache], None], set[str]]] = [
    (repeat_blank, {"1 pages listed as blank more than once: 23"}),
    (lose_blank, {"do not add up", "1 pages not in exactly one state: 23", "more pages are owned or cached"}),
    (own_blank, {"do not add up", "1 pages not in exactly one state: 23", "1 pages with a wrong reference count: 23"}),
    (cache_blank, {"do not add up", "1 pages not in exactly one state: 23", "cached without a key: 23"}),
    (share_too_often, {"1 pages with a wrong reference count: 0"}),
    (forget_holder, {"3 pages with a wrong reference count: 0, 1, 3"}),
    (hold_what_does_not_exist, {"1 pages with a wrong reference count: 0", "1 pages held that do not exist: 99"}),
    (forget_load, {"2 pages with a wrong reference count: "}),
    (lose_key, {"1 pages cached without a key", "1 pages not found under their key"}),
    (keep_key, {"1 pages blank with a key: 23"}),
    (find_another, {"1 pages not found under their key: 23"}),
    (lose_host_page, {"1 pages of the swap space not accounted for: 3"}),
    (repeat_host_page, {"1 pages of the swap space not accounted for: "}),
    (forget_memory, {"more pages are owned or cached than have memory"}),
]


@pytest.mark.parametrize(("spoil", "described"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_every_fault_is_described(spoil: Callable[[KVCache], None], described: set[str]) -> None:
    cache = cache_in_use()
    assert audit(cache) == []
    spoil(cache)
    found = audit(cache)
    assert len(found) == len(described), found
    assert all(any(part in each for each in found) for part in described), found


def test_what_runs_holds_pages_where_nothing_should() -> None:
    cache = cache_in_use()
    assert {each.split(":")[0] for each in audit(cache, is_idle=True)} == {
        "4 pages held when nothing runs",
        "sequences are swapped out when nothing runs",
    }, "pages that are being loaded have no sequence"
    for sequence in (0, 1, 3):
        cache.release(sequence)
    assert audit(cache, is_idle=True) == []
