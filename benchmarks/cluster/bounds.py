"""What no routing can exceed: hits of one cache of all replicas' size, infinite, or with evictions that know the future."""

import heapq
from collections.abc import Iterable, Sequence

from octavo.cache.page_keys import keys_of

ROOT = b"root of the keys"


def page_numbers(prompts: Iterable[list[int]], page_size: int) -> list[list[int]]:
    """The pages of each prompt that can be shared, numbered."""
    numbers: dict[bytes, int] = {}
    return [[numbers.setdefault(key, len(numbers)) for key in keys_of(ROOT, prompt, page_size)] for prompt in prompts]


def infinite_hits(prompts: Sequence[Sequence[int]]) -> int:
    """Pages found by one cache that evicts nothing and has each prompt as soon as it has come."""
    seen: set[int] = set()
    hits = 0
    for pages in prompts:
        hits += next((at for at, page in enumerate(pages) if page not in seen), len(pages))
        seen.update(pages)
    return hits


def best_hits(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Pages found at most by one cache of this many pages: it evicts the page that is used again last, or does not keep a new one (Belady's
    MIN with bypass). A page counts as found even where one before it is not, so this is a bound and cannot always be reached."""
    uses = [page for pages in prompts for page in pages]
    never = len(uses)
    following, last = [never] * len(uses), dict[int, int]()
    for at in range(len(uses) - 1, -1, -1):
        following[at] = last.get(uses[at], never)
        last[uses[at]] = at
    held: dict[int, int] = {}  # page → its next use
    latest: list[tuple[int, int]] = []  # (− next use, page); entries that no longer hold are skipped
    hits = 0
    for at, page in enumerate(uses):
        hits += page in held
        if following[at] == never:
            held.pop(page, None)
            continue
        held[page] = following[at]
        heapq.heappush(latest, (-following[at], page))
        while len(held) > capacity:
            use, victim = heapq.heappop(latest)
            if held.get(victim) == -use:
                del held[victim]
    return hits
