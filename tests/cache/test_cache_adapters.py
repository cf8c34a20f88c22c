"""Prefixes of sequences with adapters: shared with the same adapter, and with no other."""

import random

from octavo.cache import KVCache
from octavo.cache.audit import audit
from octavo.cache.snapshot import restore, take

TOKENS = list(range(40))


def computed(cache: KVCache, sequence: int, adapter: str, tokens: list[int] = TOKENS) -> int:
    """Admit, publish and release a sequence. → tokens that were found."""
    admission = cache.admit(sequence, tokens, adapter=adapter)
    assert admission is not None
    cache.publish(sequence, tokens, len(tokens))
    cache.release(sequence)
    return admission.num_cached


def test_pages_are_shared_by_adapter() -> None:
    cache = KVCache(64, 4, root=b"secret")
    assert [computed(cache, n, adapter) for n, adapter in enumerate(("", "a", "b"))] == [0, 0, 0]
    assert [computed(cache, n, adapter) for n, adapter in enumerate(("b", "", "a"), 3)] == [36, 36, 36]
    assert computed(cache, 9, "c") == 0
    assert cache.admit(10, TOKENS, adapter="a") is not None  # whose pages are shared from now on
    assert cache.num_missing(11, TOKENS, adapter="a") == cache.num_missing(12, TOKENS, adapter="d") - 9
    cache.release(10)
    assert not audit(cache, is_idle=True) and not cache._roots


def test_forks_and_swapped_sequences_keep_theirs() -> None:
    cache = KVCache(64, 4, num_host_pages=32)
    assert cache.admit(0, TOKENS, adapter="a") is not None
    cache.fork(0, 1, 39)
    assert cache.extend(1, 39, 48) is not None
    cache.publish(1, [*TOKENS[:39], *range(9)], 48)
    assert cache.swap_out(0, 40) is not None
    assert cache.swap_in(0, 40) is not None
    cache.publish(0, TOKENS, 40)
    cache.release(0)
    cache.release(1)
    assert computed(cache, 2, "") == 0
    assert computed(cache, 3, "a") == 36
    assert computed(cache, 4, "a", [*TOKENS[:39], *range(9), 5]) == 48


def test_a_restored_cache_goes_on_the_same() -> None:
    """Random sequences with three adapters, on a cache and on one restored from its state in the middle."""
    rng = random.Random(4)
    first = KVCache(40, 4)
    alive: list[int] = []
    for sequence in range(20):
        tokens = TOKENS[: rng.randrange(5, 40)]
        if first.admit(sequence, tokens, adapter=rng.choice(["", "a", "b"])) is not None:
            first.publish(sequence, tokens, len(tokens) // 2)
            alive.append(sequence)
        if len(alive) > 3:
            first.release(alive.pop(rng.randrange(len(alive))))
    second = KVCache(40, 4)
    restore(second, take(first))
    for cache in (first, second):
        for sequence in alive:
            cache.publish(sequence, TOKENS, 4 * len(cache.tables[sequence][0].pages))
    assert first.pool.index == second.pool.index and first._roots == second._roots
