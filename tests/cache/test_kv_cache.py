"""The cache's methods: each succeeds completely or changes nothing."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache
from octavo.cache.pool import PagePool
from octavo.cache.span import first_seen, longest, most_held, pages_of


def snapshot(cache: KVCache):
    pool = cache.pool
    return (list(pool.refs), list(pool.keys), dict(pool.index), list(pool.blank), list(pool.cached)), {
        k: [(table.first, list(table.pages)) for table in v] for k, v in cache.tables.items()
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
        (pages,) = cache.admit(sequence, [sequence] * length).pages
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


# ── groups with windows ──


def held(cache: KVCache, sequence: int) -> list[tuple[int, int]]:
    """(first entry, number of pages) in each group."""
    return [(table.first, len(table.pages)) for table in cache.tables[sequence]]


def test_a_window_lets_go_of_what_no_later_token_sees():
    cache = KVCache(100, 4, windows=(0, 6), max_step_tokens=8)
    tokens = list(range(40))
    cache.admit(1, tokens)
    assert held(cache, 1) == [(0, 10), (0, 4)], "a window and a step, wherever in a page that begins"
    for start in range(8, 40, 8):
        assert cache.extend(1, start, start + 8) is not None
        assert held(cache, 1)[1][0] == (start - 5) // 4
    for position in range(40, 60):
        assert cache.extend(1, position, position + 1) is not None
        first, count = held(cache, 1)[1]
        assert first == (position - 5) // 4 and first + count == position // 4 + 1
    cache.release(1)
    assert cache.pool.num_used == 0


def test_extend_counts_what_the_window_gives_back_and_changes_nothing_without_enough():
    cache = KVCache(3, 4, windows=(5,), max_step_tokens=4)
    cache.admit(1, list(range(9)))
    assert cache.pool.num_free == 0
    (growth,) = cache.extend(1, 12, 16)
    assert (growth.entries, growth.copied) == ([3], None), "positions before 8 are behind it: two pages for one"
    assert held(cache, 1) == [(2, 2)]
    before = snapshot(cache)
    assert cache.extend(1, 16, 28) is None
    assert snapshot(cache) == before


def test_pages_behind_a_window_serve_as_prefix_until_others_need_them():
    cache = KVCache(100, 2, windows=(3,), max_step_tokens=2)
    tokens = list(range(20))
    cache.admit(1, tokens)
    for end in range(2, 21, 2):
        cache.extend(1, end - 2, end)
        cache.publish(1, tokens, end)
    assert len(cache.pool.cached) == 8 and held(cache, 1) == [(8, 2)]
    admission = cache.admit(2, tokens[:11])
    assert admission.num_cached == 10
    assert admission.pages[0][:4] == [0] * 4, "what the window has passed is not asked for"
    assert admission.pages[0][4] == cache.tables[2][0].pages[0] and cache.pool.refs[admission.pages[0][4]] == 1


def run_through(cache: KVCache, sequence: int, tokens: list[int]) -> int:
    """Admit the sequence and advance through all of it, two tokens a step. Return the number of tokens found in the cache."""
    admission = cache.admit(sequence, tokens)
    for start in range(admission.num_cached, len(tokens), 2):
        end = min(start + 2, len(tokens))
        assert cache.extend(sequence, start, end) is not None
        cache.publish(sequence, tokens, end)
    return admission.num_cached


def test_a_long_prompt_does_not_drive_out_what_others_share():
    cache = KVCache(24, 2, windows=(4,), max_step_tokens=2)
    stem = [100 + i for i in range(8)]
    run_through(cache, 1, [*stem, 1])
    cache.release(1)
    for sequence in range(2, 30):
        tail = [1000 * sequence + i for i in range(60)]
        # The window has also passed the stem's pages, but they were found.
        assert run_through(cache, sequence, [*stem, *tail]) == 8
        cache.release(sequence)


def test_a_fork_shares_what_its_next_token_sees():
    cache = KVCache(100, 2, windows=(0, 3), max_step_tokens=8)
    cache.admit(1, list(range(8)))
    whole, recent = cache.fork(1, 2, 7)
    assert whole == cache.tables[1][0].pages and recent == [0, 0, *cache.tables[1][1].pages[2:]]
    growths = cache.extend(2, 7, 8)
    assert [growth.copied for growth in growths] == [whole[3], recent[3]]


def test_swapping_moves_what_the_window_keeps():
    cache = KVCache(100, 2, num_host_pages=10, windows=(0, 3), max_step_tokens=2)
    cache.admit(1, list(range(12)))
    cache.extend(1, 10, 12)
    out = cache.swap_out(1, 12)
    assert len(out.host) == 6 + 1 and cache.num_host_used == 7 and cache.pool.num_used == 0
    back = cache.swap_in(1, 13)
    assert back.host == out.host and held(cache, 1) == [(0, 7), (5, 2)]
    assert back.device == cache.tables[1][0].pages[:6] + cache.tables[1][1].pages[:1]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(0,), (3,), (0, 3), (0, 0, 5), (5, 3), (1,)]))
def test_the_longest_prefix_that_every_group_can_serve_is_found(seed, windows):
    rng = random.Random(seed)
    cache = KVCache(200, 2, windows=windows, max_step_tokens=30)
    tokens = list(range(30))
    cache.admit(1, tokens)
    cache.publish(1, tokens, 30)
    tables = [table.pages for table in cache.tables[1]]
    cache.release(1)
    missing = {(group, entry) for group in range(len(windows)) for entry in range(15) if rng.random() < 0.12}
    for group, entry in missing:
        page = tables[group][entry] if entry < len(tables[group]) else None
        if page is not None:
            del cache.pool.index[cache.pool.keys[page]], cache.pool.cached[page]
            cache.pool.keys[page] = None
            cache.pool.blank.append(page)

    def serves(num_pages: int) -> bool:
        return not any(
            entry < num_pages and 2 * entry + 1 > 2 * num_pages - window if window else entry < num_pages
            for group, entry in missing
            for window in windows[group : group + 1]
        )

    assert cache.admit(2, tokens).num_cached == 2 * max(n for n in range(15) if serves(n))


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_spans_hold_every_step_and_not_a_page_more(length, window, step_tokens, page_size):
    most = most_held(window, step_tokens, page_size)
    needs = [
        (start + step_tokens - 1) // page_size - first_seen(start, window, page_size) + 1
        for start in range(window, window + 2 * page_size)
    ]
    assert max(needs) <= most <= -(-(window + step_tokens) // page_size) + 1
    if step_tokens == 1 or window > page_size:
        assert max(needs) == most
    for windows in ((0,), (window,), (0, window)):
        pages = pages_of(length, page_size, windows, step_tokens)
        found = longest(pages, 1000, page_size, windows, step_tokens)
        assert found >= length and pages_of(found, page_size, windows, step_tokens) <= pages
