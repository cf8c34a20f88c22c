"""Keys of pages: the same for everyone who has the root, unrelated for everyone else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cache import KVCache
from octavo.cache.page_keys import adapter_root, fleet_root, keys_of
from octavo.cache.pool import ChangeLog

SECRET = b"a secret of the fleet"


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(1, 5))
def test_a_cache_publishes_the_keys_that_a_router_computes(tokens: list[int], page_size: int) -> None:
    root = fleet_root(SECRET, "octavo-1-abc")
    cache = KVCache(64, page_size, root=root)
    assert cache.admit(1, tokens) is not None
    cache.publish(1, tokens, len(tokens))
    expected = keys_of(root, [*tokens, 0], page_size)
    assert cache.findable_keys() == expected
    cache.release(1)
    cached = cache.admit(2, tokens)
    assert cached is not None and cached.num_cached == len(keys_of(root, tokens, page_size)) * page_size


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()), max_size=12), st.integers(1, 4))
def test_keys_do_not_depend_on_the_prompt_before(prompts: list[tuple[int, int, bool]], page_size: int) -> None:
    """Prompts that begin alike, and have an adapter or none."""
    root = fleet_root(SECRET, "octavo-1-abc")
    cache = KVCache(64, page_size, root=root)
    for sequence, (num_shared, num_own, has_adapter) in enumerate(prompts):
        tokens = [*range(num_shared), *range(100 * sequence, 100 * sequence + num_own), 7]
        cache.keys_made = []
        cache.num_missing(sequence, tokens, adapter="a" if has_adapter else "")
        start = adapter_root(root, "a") if has_adapter else root
        assert cache.keys_made == keys_of(start, tokens, page_size)


def test_other_secrets_fingerprints_and_salts_share_no_key() -> None:
    roots = [
        fleet_root(SECRET, "octavo-1-abc"),
        fleet_root(b"another one of a fleet", "octavo-1-abc"),
        fleet_root(SECRET, "octavo-1-abd"),
        fleet_root(SECRET, "octavo-1-abc", b"tenant"),
        fleet_root(SECRET, "octavo-1-abc", b"tenants"),
    ]
    keys = [key for root in roots for key in keys_of(root, list(range(65)), 16)]
    assert len(set(keys)) == len(keys) == 20
    assert fleet_root(SECRET, "octavo-1-abc") == roots[0]


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 65])
def test_a_secret_has_a_length(secret: bytes) -> None:
    with pytest.raises(ValueError, match=f"the secret has {len(secret)} bytes; it must have 16 to 64"):
        fleet_root(secret, "octavo-1-abc")


def test_a_router_hears_of_the_group_that_keeps_all_pages() -> None:
    """Pages of the group with the window are freed once the window has passed them; those of the other stay, and decide how much of a
    prefix can be used."""
    cache = KVCache(64, 2, windows=(2, 0), max_step_tokens=2, root=b"root")
    cache.watch_pages()
    tokens = list(range(9))
    assert cache.admit(1, tokens) is not None
    for end in range(2, 10, 2):
        assert cache.extend(1, end - 2, end) is not None
        cache.publish(1, tokens, end)
    assert cache.findable_keys() == keys_of(b"root", tokens, 2)
    assert list(cache.take_changes().stored) == keys_of(b"root", tokens, 2)
    cache.reset_prefixes()
    assert list(cache.take_changes().evicted) == keys_of(b"root", tokens, 2)


def test_nothing_is_logged_when_nothing_listens() -> None:
    cache = KVCache(8, 2)
    cache.admit(1, [1, 2, 3])
    cache.publish(1, [1, 2, 3], 2)
    assert cache.take_changes() == ((), ())
    cache.watch_pages()
    assert cache.take_changes() == ((), ())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_changes_are_net(steps: list[tuple[bool, int]]) -> None:
    log, held, told = ChangeLog(), set(), set()
    for takes, number in steps:
        key = bytes([number])
        if key in held:
            held.remove(key)
            log.evict(key)
        else:
            held.add(key)
            log.store(key)
        if takes:
            stored, evicted = log.take()
            assert not told.intersection(stored) and told.issuperset(evicted), "a change that is none"
            told = told.union(stored).difference(evicted)
            assert told == held
