"""Which idle pages are evicted first: the least recently used, or those of the least worth where that finds more; and
last those that a client asked to keep."""

import pickle
import random

import msgspec
import pytest

from benchmarks.evictions import agents, chats, share_found, system_prompts
from octavo.cache import KVCache, audit
from octavo.cache import pool as pool_module
from octavo.cache import snapshot as snapshots
from octavo.cache.eviction import KEPT, POLICIES, ByWorth, IdlePages
from octavo.cache.page_keys import KEY_BYTES
from octavo.cache.pool import PagePool
from octavo.cache.snapshot import CacheState


def visit(cache: KVCache, sequence: int, tokens: list[int]) -> int:
    """A request that comes, is computed and leaves. → tokens that it found."""
    admission = cache.admit(sequence, tokens)
    assert admission is not None
    cache.publish(sequence, tokens, len(tokens))
    cache.release(sequence)
    return admission.num_cached


@pytest.mark.parametrize("policy", POLICIES)
def test_without_reuse_the_oldest_goes_first_and_of_a_prompt_its_end(policy: str) -> None:
    pool = PagePool(4, policy=policy)
    first, second = pool.take(2), pool.take(2)
    for page in (*first, *second):
        pool.publish(page, b"%d" % page)
    pool.give(first)
    pool.give(second)
    assert list(pool.cached) == [1, 0, 3, 2]
    assert [pool.take(1) for _ in range(4)] == [[1], [0], [3], [2]]


def test_agents_that_take_turns_keep_a_part_of_their_prompts() -> None:
    """In a store of a quarter of what they need, each has lost its pages when its turn comes, if the least recently used goes."""
    trace = agents(0)
    num_pages = len({block for blocks in trace for block in blocks}) // 4
    lru, adaptive = (share_found(trace, num_pages, policy, 1, 16) for policy in ("lru", "adaptive"))
    assert lru < 0.05 and adaptive > 0.13


def test_in_a_store_of_half_of_them_agents_in_turn_find_twice_as_much() -> None:
    lru, adaptive = (
        share_found(agents(0, sessions=12, turns=20), 2010, policy, 1, 16) for policy in ("lru", "adaptive")
    )
    assert adaptive > 2 * lru > 0.4


def by_worth(num_pages: int, page_tokens: int) -> PagePool:
    pool = PagePool(num_pages, policy="adaptive", page_tokens=page_tokens)
    pool.cached.is_by_worth = True
    return pool


def test_of_prompts_found_equally_often_the_shorter_goes_first() -> None:
    """A page of a long prompt costs more to compute: its attention sees more tokens."""
    pool = by_worth(8, 4096)
    long, short = pool.take(6), pool.take(2)
    for page in (*long, *short):
        pool.publish(page, b"%d" % page)
    pool.cached.note_found([*long, *short])
    pool.give(long)
    pool.give(short)
    assert list(pool.cached) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_pages_that_are_found_no_more_are_overtaken() -> None:
    pool = by_worth(3, 16)
    (old,) = pool.take(1)
    pool.publish(old, b"old")
    for _ in range(5):
        pool.cached.note_found([old])
    pool.give([old])
    for number in range(200):
        (page,) = pool.take(1)
        if page == old:
            break
        pool.publish(page, b"new %d" % number)
        pool.give([page])
    assert page == old and number > 5


@pytest.mark.parametrize("seed", range(4))
def test_a_page_is_evicted_before_those_that_it_continues(seed: int) -> None:
    """What is deeper in a prompt is of no use without what comes before it."""
    dice = random.Random(seed)
    pool = by_worth(60, 16)
    index = pool.index
    for _ in range(400):
        name, length = dice.randrange(6), dice.randrange(1, 20)
        keys = [b"%d.%d" % (name, at) for at in range(length)]
        found = next((at for at, key in enumerate(keys) if key not in index), length)
        pages = [index[key] for key in keys[:found]]
        for page in pages:
            pool.share([page])
        pool.cached.note_found(pages)
        pages += pool.take(length - found)
        for page, key in zip(pages, keys, strict=True):
            pool.publish(page, key)
        pool.give(pages)
        for each in range(6):
            depths = [int(key.split(b".")[1]) for key in index if key.startswith(b"%d." % each)]
            assert sorted(depths) == list(range(len(depths)))


@pytest.mark.parametrize("num_pages", [300, 1500])
def test_it_finds_no_less_than_lru_where_worth_does_not_help(num_pages: int) -> None:
    for trace in (agents(1, order="random"), chats(1, num_requests=300), system_prompts(1, num_requests=300)):
        lru, adaptive = (share_found(trace, num_pages, policy, 2, 16) for policy in ("lru", "adaptive"))
        assert adaptive >= lru - 0.005


def random_cache(seed: int) -> tuple[KVCache, random.Random]:
    dice = random.Random(seed)
    return KVCache(dice.randrange(40, 90), 2, eviction="adaptive", root=b"root"), dice


def run(cache: KVCache, dice: random.Random, first: int, num_requests: int, in_turn: bool) -> list[object]:
    """Sessions that come again, and holds on some of them; what happened, page by page."""
    seen: list[object] = []
    held: list[list[bytes]] = []
    for sequence in range(first, first + num_requests):
        session = sequence % 6 if in_turn else dice.randrange(6)
        length = 50 if in_turn else dice.randrange(4, 30)
        tokens = [session * 1000 + at for at in range(length)] + [dice.randrange(10**6), 5]
        admission = cache.admit(sequence, tokens)
        assert admission is not None
        cache.publish(sequence, tokens, len(tokens))
        seen.append((admission, list(cache.pool.blank), list(cache.pool.cached)))
        keys = [key for page in cache.tables[sequence][0].pages if (key := cache.pool.keys[page]) is not None]
        cache.release(sequence)
        if dice.random() < 0.1:
            cache.hold(keys)
            held.append(keys)
        elif held and dice.random() < 0.1:
            cache.let_go(held.pop(dice.randrange(len(held))))
        assert audit(cache, is_idle=True) == []
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_a_restored_cache_evicts_the_same_pages(seed: int) -> None:
    cache, dice = random_cache(seed)
    in_turn = seed < 3
    run(cache, dice, 0, 120, in_turn)
    cache.pool.cached.is_by_worth = in_turn
    assert any(level for level, _ in cache.pool.cached.state().by_worth), (
        "what is to be restored has something to restore"
    )
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshots.take(cache)), type=CacheState)
    other = KVCache(cache.pool.num_pages, 2, eviction="adaptive", root=b"root")
    snapshots.restore(other, state)
    other.pool._evicted = tuple(map(set, cache.pool._evicted))  # says why a prefix was missed, and steers nothing
    position = dice.getstate()
    expected = run(cache, dice, 200, 60, in_turn)
    dice.setstate(position)
    assert run(other, dice, 200, 60, in_turn) == expected


def test_a_state_from_before_there_were_policies_is_restored_as_lru() -> None:
    cache = KVCache(8, 2)
    visit(cache, 0, [1, 2, 3, 4])
    visit(cache, 1, [5, 6, 7, 8])
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshots.take(cache)))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:-1]), type=CacheState)
    assert state.idle is None
    other = KVCache(8, 2)
    snapshots.restore(other, state)
    assert list(other.pool.cached) == list(cache.pool.cached) == [1, 0, 3, 2] and audit(other, is_idle=True) == []


def test_pages_that_are_held_are_evicted_last_and_as_others_afterwards() -> None:
    cache = KVCache(8, 2)
    visit(cache, 0, [1, 2, 3, 4])
    keys = [key for key in cache.pool.keys if key is not None]
    cache.hold(keys)
    cache.hold(keys[:1])
    for sequence in range(1, 20):
        visit(cache, sequence, [sequence * 100 + at for at in range(12)])
        assert [key in cache.pool.index for key in keys] == [True, True]
    assert cache.pool.cached.num_kept() == 2
    cache.let_go(keys[::-1])
    assert cache.pool.cached.num_kept() == 1, "the first page is held twice"
    cache.let_go(keys[:1])
    assert cache.pool.cached.num_kept() == 0 and not cache.pool.cached.keep
    visit(cache, 20, list(range(5000, 5016)))
    assert not any(key in cache.pool.index for key in keys)


def test_pages_that_are_held_give_way_where_nothing_else_is_left() -> None:
    """A request always finds room: holding is a wish."""
    cache = KVCache(4, 2)
    visit(cache, 0, [1, 2, 3, 4, 5, 6])
    cache.hold([key for key in cache.pool.keys if key is not None])
    assert visit(cache, 1, list(range(100, 108))) == 0
    assert audit(cache, is_idle=True) == []


def test_a_page_is_held_before_it_is_computed() -> None:
    cache = KVCache(8, 2)
    visit(cache, 0, [1, 2, 3])
    (key,) = [key for key in cache.pool.keys if key is not None]
    cache.reset_prefixes()
    cache.hold([key])
    visit(cache, 1, [1, 2, 3])
    page = cache.pool.index[key]
    assert cache.pool.cached.is_kept(page) and cache.pool.cached._list_of[page] == KEPT


def test_it_says_why_no_more_was_found() -> None:
    cache = KVCache(8, 2)

    def why(sequence: int, tokens: list[int], reuse: bool = True) -> str:
        admission = cache.admit(sequence, tokens, reuse=reuse)
        assert admission is not None
        cache.publish(sequence, tokens, len(tokens))
        cache.release(sequence)
        return admission.miss

    assert why(0, [1, 2]) == "short"
    assert why(1, [1, 2, 3, 4, 5]) == "new"
    assert why(2, [1, 2, 3, 4, 6]) == ""
    assert why(3, [1, 2, 3, 9, 6]) == "new"
    assert why(4, [1, 2, 3, 4, 5], reuse=False) == "needed"
    assert why(5, list(range(50, 66))) == "new"  # takes all pages
    assert why(6, [1, 2, 3, 4, 5]) == "evicted"
    cache.reset_prefixes()
    assert why(7, [1, 2, 3, 4, 5]) == "new"
    off = KVCache(8, 2, prefix_caching=False).admit(0, [1, 2, 3])
    assert off is not None and off.miss == "off"


def test_only_the_last_evicted_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_REMEMBERED", 5)
    cache = KVCache(4, 2)
    for sequence in range(10):
        keys = list(cache.pool.index)
        visit(cache, sequence, [sequence * 100 + at for at in range(8)])
    assert cache.pool.was_evicted(keys[0]), "its prompt's last page is evicted first"
    before, latest = cache.pool._evicted
    assert 2 <= len(before | latest) <= 5


def test_a_prefix_that_windows_have_freed_is_told_apart() -> None:
    cache = KVCache(100, 2, windows=(0, 3), max_step_tokens=4)
    tokens = list(range(20))
    assert cache.admit(0, tokens) is not None
    for start in range(0, 20, 4):
        cache.extend(0, start, start + 4)
        cache.publish(0, tokens, start + 4)
    cache.release(0)
    pool = cache.pool
    for page in list(pool.cached):
        key = pool.keys[page]
        if key is not None and key.endswith(b"\1") and len(key) > KEY_BYTES:  # of the group with a window
            del pool.index[key], pool.cached[page]
            pool.keys[page] = None
            pool.blank.append(page)
    again = cache.admit(1, [*tokens[:12], 99, 98, 97])
    assert again is not None and (again.num_cached, again.miss) == (0, "window")


def test_idle_pages_are_in_one_list_each() -> None:
    idle = IdlePages(6, "adaptive")
    for page in range(6):
        idle.add(page, b"%d" % page, is_spent=page == 4)
    assert list(idle) == [4, 0, 1, 2, 3, 5] and len(idle) == 6 and 4 in idle
    del idle[2]
    assert [idle.pop() for _ in range(len(idle))] == [4, 0, 1, 3, 5] and 2 not in idle
    with pytest.raises(AssertionError):
        idle.pop()


def test_levels_of_entries_that_left_take_no_memory() -> None:
    """Where pages leave in the order of their last use, the other order is kept up all the same."""
    entries: ByWorth[int] = ByWorth()
    sizes = []
    for number in range(4000):
        entries.add(number % 8, 1 + number % 5)
        if len(entries) == 8:
            entries.remove((number + 1) % 8)
        if number % 1000 == 999:
            sizes.append(len(pickle.dumps(entries)))
    assert max(sizes) < 2 * sizes[0] < 4000, sizes
