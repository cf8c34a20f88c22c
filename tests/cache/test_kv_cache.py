"""The verbs of the cache: each succeeds whole or changes nothing."""

from octavo.cache import KVCache
from octavo.cache.pool import PagePool


def snapshot(cache: KVCache):
    pool = cache.pool
    return (list(pool.refs), list(pool.keys), dict(pool.index), list(pool.blank), list(pool.cached)), {
        k: list(v) for k, v in cache.tables.items()
    }


def test_admit_that_does_not_fit_changes_nothing():
    cache = KVCache(4, 2)
    assert cache.admit(1, [1, 2, 3, 4, 5]) is not None
    before = snapshot(cache)
    assert cache.admit(2, [9, 9, 9]) is None
    assert cache.admit(3, [9], spare=1) is None
    assert snapshot(cache) == before


def test_extend_that_does_not_fit_changes_nothing():
    cache = KVCache(2, 2)
    cache.admit(1, [1, 2, 3])
    before = snapshot(cache)
    assert cache.extend(1, 3, 5) is None
    assert snapshot(cache) == before


def test_swap_out_without_host_pages_changes_nothing():
    cache = KVCache(4, 2, num_host_pages=1)
    cache.admit(1, [1, 2, 3])
    before = snapshot(cache)
    assert cache.swap_out(1, 3) is None
    assert snapshot(cache) == before


def test_a_prefix_is_found_by_what_came_before_it_too():
    cache = KVCache(10, 2)
    cache.admit(1, [1, 2, 3, 4, 5])
    cache.publish(1, [1, 2, 3, 4, 5], 5)
    cache.release(1)
    assert cache.admit(2, [1, 2, 3, 4, 9]).num_cached == 4
    assert cache.admit(3, [7, 2, 3, 4, 9]).num_cached == 0


def test_the_last_token_is_never_cached():
    cache = KVCache(10, 2)
    cache.admit(1, [1, 2, 3, 4])
    cache.publish(1, [1, 2, 3, 4], 4)
    assert cache.admit(2, [1, 2, 3, 4]).num_cached == 2


def test_the_longest_unused_prefix_is_evicted_first_tail_first():
    cache = KVCache(4, 2)
    for sequence, tokens in ((1, [1, 2, 3, 4]), (2, [5, 6, 7, 8])):
        cache.admit(sequence, tokens)
        cache.publish(sequence, tokens, 4)
    cache.release(1)
    cache.release(2)
    cache.admit(3, [0])  # takes one page: the tail of the sequence that was released first
    assert cache.admit(4, [1, 2, 3, 4, 5]) is None or cache.tables[4]
    cache.release(3)
    assert cache.hit_tokens == 2


def test_without_prefix_caching_nothing_is_shared():
    cache = KVCache(10, 2, prefix_caching=False)
    cache.admit(1, [1, 2, 3, 4, 5])
    cache.publish(1, [1, 2, 3, 4, 5], 5)
    assert cache.admit(2, [1, 2, 3, 4, 5]).num_cached == 0


def test_waste_is_below_one_page_per_sequence():
    cache = KVCache(100, 16)
    for sequence, length in enumerate((1, 15, 16, 17, 200)):
        pages = cache.admit(sequence, [sequence] * length).pages
        assert 0 <= len(pages) * 16 - length < 16


def test_cached_pages_alone_take_no_page_that_was_never_used():
    pool = PagePool(10, num_warm=4)

    def use(count: int, key: bytes) -> list[int]:
        pages = pool.take(count)
        for number, page in enumerate(pages):
            pool.publish(page, key + bytes([number]))
        pool.give(pages)
        return pages

    assert use(3, b"a") == [0, 1, 2] and len(pool.cached) == 3
    assert use(1, b"b") == [3], "the last of the warm ones"
    assert set(use(2, b"c")) <= {0, 1, 2}, "an idle prefix goes before a page that was never used is taken"
    assert set(pool.take(4)) == {0, 1, 2, 3}
    assert pool.take(3) == [4, 5, 6], "requests that run may have all there is"
    assert pool.num_free == 3


def test_blank_pages_that_were_used_come_first():
    pool = PagePool(10)
    pages = pool.take(4)
    pool.give(pages[2:])
    assert set(pool.take(2)) == set(pages[2:])
    assert pool.take(1) == [4]
