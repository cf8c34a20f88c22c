"""IdlePages: the pages of the prefix cache that have no owner, and which of them is evicted next.

In this order: pages that are unlikely to be shared; pages in the order of their last use, or of their worth; pages that
are kept for a while because a client asked for it.

A page's worth is how often it was found again, times what a page of a prompt of that length costs to compute. It is
counted from the worth of the page that was evicted last, so pages that are found no more are overtaken by others,
however often they were found once. This order keeps prefixes that come again after more other pages than the store
holds; where only the latest prefixes come again, the order of last use finds more. So both are tried out on keys alone:
two small caches that hold a sample of the keys, one in each order, count what they would have found, and the pages
follow the better one. Nothing here depends on a clock: the same requests in the same order evict the same pages."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

POLICIES = ("adaptive", "lru")
"""lru: always in the order of last use."""

MAX_HITS = 15  # finding a page more often adds no worth
WEIGHT = 4  # of a hit of a short prompt's page …
WEIGHT_TOKENS = 8192  # … and as much more for every so many tokens of the prompt: there attention costs about as much as all the rest
SMALL_STORE = 1024  # pages; of larger stores only a sample of the keys is tried out
SAMPLED = 8  # one key of so many
DRAWN = 8  # one request of so many counts as found though it comes for the first time: else nothing would be where nothing is found
# Pages are evicted by worth where that finds (so many times more, and more by so many times the capacity), one pair or the other …
LEAST_GAINS = ((1.5, 0.125), (1.15, 1.0))
KEPT_GAIN = 1.05  # … until it does not find so many times more
FORGET_AFTER = 16  # times the capacity: keys that were tried out, after which the counts are halved
SPENT, IDLE, KEPT = range(3)

T = TypeVar("T", int, bytes)
Levels = list[tuple[int, list[T]]]


class ByWorth(Generic[T]):
    """Entries in the order of their worth; equal ones in the order in which they came."""

    __slots__ = ("_level_of", "_levels", "_order", "floor")

    def __init__(self) -> None:
        self.floor = 0  # level of the entry that was popped last
        self._levels: dict[int, OrderedDict[T, None]] = {}
        self._order: list[int] = []  # a heap of all levels; some may be empty
        self._level_of: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, entry: T) -> bool:
        return entry in self._level_of

    def __iter__(self) -> Iterator[T]:
        """In the order in which they would be popped."""
        for level in sorted(self._levels):
            yield from self._levels[level]

    def __delitem__(self, entry: T) -> None:
        del self._levels[self._level_of.pop(entry)][entry]

    def add(self, entry: T, worth: int) -> None:
        self._place(entry, self.floor + worth)

    def pop(self) -> T:
        """Take the entry that is worth least."""
        self._drop_empty()
        self.floor = self._order[0]
        entry = self._levels[self.floor].popitem(last=False)[0]
        del self._level_of[entry]
        return entry

    def remove(self, entry: T) -> None:
        """Take an entry that left in another order: what is added from now on is worth more than it was."""
        level = self._level_of.pop(entry)
        del self._levels[level][entry]
        self.floor = max(self.floor, level)
        self._drop_empty()

    def clear(self) -> None:
        self._levels.clear()
        self._order.clear()
        self._level_of.clear()

    def levels(self) -> "Levels[T]":
        return [(level, list(self._levels[level])) for level in sorted(self._levels) if self._levels[level]]

    def restore(self, levels: "Levels[T]", floor: int) -> None:
        self.floor = floor
        for level, entries in levels:
            for entry in entries:
                self._place(entry, level)

    def _drop_empty(self) -> None:
        """Forget the lowest levels that are empty. New ones are made as the floor rises, without end."""
        while self._order and not self._levels[self._order[0]]:
            del self._levels[heappop(self._order)]

    def _place(self, entry: T, level: int) -> None:
        entries = self._levels.get(level)
        if entries is None:
            entries = self._levels[level] = OrderedDict()
            heappush(self._order, level)
        entries[entry] = None
        self._level_of[entry] = level


def weight_of(num_tokens: int) -> int:
    """What a hit of one page of a prompt of this length is worth: roughly what computing it costs."""
    return WEIGHT + WEIGHT * num_tokens // WEIGHT_TOKENS


def worth_of(hits: int, weight: int) -> int:
    """A page that was never found is worth a quarter of one that was found once."""
    return weight // 4 + hits * weight


class TrialState(msgspec.Struct, array_like=True, gc=False):
    """One of the two caches on trial."""

    levels: list[tuple[int, list[bytes]]]
    floor: int
    hits: dict[bytes, int]
    num_found: float


class IdleState(msgspec.Struct, array_like=True, gc=False):
    """As lists of pages, each in the order in which they will be evicted; and what decides about their order."""

    spent: list[int]
    by_use: list[int]
    by_worth: list[tuple[int, list[int]]]  # the same pages, by level
    kept: list[int]
    hits: list[tuple[int, int, int]]  # (page, how often it was found, weight), of pages that were found
    keep: list[tuple[bytes, int]]
    trials: list[TrialState]  # none: the policy is lru
    num_tried: float
    num_requests: int
    is_by_worth: bool
    floor: int = 0


class _Trial:
    """Which of the keys a cache of `capacity` keys would have found, evicting by worth or by last use."""

    __slots__ = ("by_worth", "entries", "hits", "num_found")

    def __init__(self, by_worth: bool) -> None:
        self.by_worth = by_worth
        self.entries: ByWorth[bytes] = ByWorth()
        self.hits: dict[bytes, int] = {}  # of keys that were found
        self.num_found = 0.0

    def look_up(self, keys: list[bytes], capacity: int, weight: int, is_drawn: bool) -> None:
        """A request's keys. It finds those before the first that is missing."""
        entries, hits = self.entries, self.hits
        num_found = next((at for at, key in enumerate(keys) if key not in entries), len(keys))
        self.num_found += num_found
        found = keys[:num_found]
        new = [key for key in keys[num_found:] if key not in entries]
        for key in found:
            del entries[key]
        for _ in range(min(len(entries) + len(found) + len(new) - capacity, len(entries))):
            hits.pop(entries.pop(), None)
        # From the last page to the first: the head of a prefix is evicted last.
        if not self.by_worth:
            for key in reversed(found + new):
                entries.add(key, 1)  # more than what is evicted next, so this is the order of last use
            return
        for key in reversed(new):
            if is_drawn:
                hits[key] = 1
            entries.add(key, worth_of(int(is_drawn), weight))
        for key in reversed(found):
            count = hits[key] = min(hits.get(key, 0) + 1, MAX_HITS)
            entries.add(key, worth_of(count, weight))

    def clear(self) -> None:
        self.entries.clear()
        self.hits.clear()

    def state(self) -> TrialState:
        return TrialState(self.entries.levels(), self.entries.floor, dict(self.hits), self.num_found)

    def restore(self, state: TrialState) -> None:
        self.entries.restore(state.levels, state.floor)
        self.hits, self.num_found = dict(state.hits), state.num_found


class IdlePages:
    def __init__(self, num_pages: int, policy: str = "lru", page_tokens: int = 16) -> None:
        assert policy in POLICIES
        self.capacity = num_pages  # pages that the cache may use, idle or not
        self.page_tokens = page_tokens
        self.count = 0
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._by_use: OrderedDict[int, None] = OrderedDict()
        self._by_worth: ByWorth[int] = ByWorth()  # the same pages in their other order; empty where the policy is lru
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._lists = (self._spent, self._by_use, self._kept)
        self._list_of = bytearray(num_pages)
        self._hits = bytearray(num_pages)  # how often each page was found by a request, at most MAX_HITS
        self._weights = array("I", [0]) * num_pages  # the largest weight_of() the prompts that it was a part of
        self.keep: dict[bytes, int] = {}  # keys of pages that are evicted last → how often that was asked for
        self._trials = [_Trial(by_worth=False), _Trial(by_worth=True)] if policy == "adaptive" else []
        self._num_tried = 0.0
        self._num_requests = 0
        self.is_by_worth = False  # which of the two orders pages are evicted in

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        """In the order in which they will be evicted."""
        yield from reversed(self._spent)
        yield from self._by_worth if self.is_by_worth else self._by_use
        yield from self._kept

    def __contains__(self, page: int) -> bool:
        return page in self._lists[self._list_of[page]]

    def __delitem__(self, page: int) -> None:
        """It has an owner again."""
        self._take_out(page)
        self.count -= 1

    def add(self, page: int, key: bytes, is_spent: bool = False, num_pages: int = 1) -> None:
        """It has no owner any more. `is_spent`: it is evicted before all others. `num_pages`: of the prompt and answer that it is a part of."""
        self.count += 1
        if self.keep and key in self.keep:
            self._put(page, KEPT)
        elif is_spent:
            self._put(page, SPENT)
        else:
            if self._trials:
                weight = weight_of(num_pages * self.page_tokens)
                if weight > self._weights[page]:
                    self._weights[page] = weight
            self._put(page, IDLE)

    def pop(self) -> int:
        """Take the page that is worth least."""
        assert self.count, "no page is idle"
        self.count -= 1
        page = self._pop()
        self._hits[page] = self._weights[page] = 0
        return page

    def _pop(self) -> int:
        if self._spent:
            return self._spent.popitem()[0]
        if not self._by_use:
            return self._kept.popitem(last=False)[0]
        if self.is_by_worth:
            page = self._by_worth.pop()
            del self._by_use[page]
            return page
        page = self._by_use.popitem(last=False)[0]
        if self._trials:
            self._by_worth.remove(page)
        return page

    def clear(self) -> None:
        for pages in self._lists:
            pages.clear()
        self._by_worth.clear()
        self.count = 0
        num_pages = len(self._hits)
        self._hits, self._weights = bytearray(num_pages), array("I", [0]) * num_pages
        for trial in self._trials:
            trial.clear()

    def note_found(self, pages: Iterable[int]) -> None:
        """A request found these pages in the prefix cache."""
        hits = self._hits
        for page in pages:
            if hits[page] < MAX_HITS:
                hits[page] += 1

    def kept(self) -> Iterable[int]:
        """Idle pages that are evicted last."""
        return self._kept

    def num_kept(self) -> int:
        return len(self._kept)

    def is_kept(self, page: int) -> bool:
        return page in self._kept

    # ── pages that are kept because a client asked for it ──

    def hold(self, keys: Iterable[bytes], index: dict[bytes, int]) -> None:
        """Evict the pages of these keys, those of today and of later, after all others."""
        for key in keys:
            self.keep[key] = self.keep.get(key, 0) + 1
            page = index.get(key)
            if page is not None and page in self:
                self._move(page, KEPT)

    def let_go(self, keys: Iterable[bytes], index: dict[bytes, int]) -> None:
        """Undo hold(). From the last to the first: the head of a prefix is evicted last."""
        for key in keys:
            self.keep[key] -= 1
            if self.keep[key]:
                continue
            del self.keep[key]
            page = index.get(key)
            if page is not None and self.is_kept(page):
                self._move(page, IDLE)

    # ── which order is better ──

    def look_up(self, keys: list[bytes]) -> bool:
        """A request asks for the pages of these keys. → whether those that it computes count as found, too (note_found)."""
        if not self._trials:
            return False
        self._num_requests += 1
        is_drawn = _is_drawn(self._num_requests)
        self._try_out(keys, is_drawn)
        return is_drawn and self.is_by_worth

    def _try_out(self, keys: list[bytes], is_drawn: bool) -> None:
        weight = weight_of(len(keys) * self.page_tokens)
        if self.capacity > SMALL_STORE:
            keys = [key for key in keys if not key[0] % SAMPLED]
            capacity = self.capacity // SAMPLED
        else:
            capacity = self.capacity
        if not keys:
            return
        keys = keys[:capacity]
        by_use, by_worth = self._trials
        by_use.look_up(keys, capacity, weight, is_drawn)
        by_worth.look_up(keys, capacity, weight, is_drawn)
        self._num_tried += len(keys)
        if self._num_tried > FORGET_AFTER * capacity:
            self._num_tried /= 2
            by_use.num_found /= 2
            by_worth.num_found /= 2
        if self.is_by_worth:
            self.is_by_worth = by_worth.num_found >= KEPT_GAIN * by_use.num_found
        else:
            least = min(times * by_use.num_found + more * capacity for times, more in LEAST_GAINS)
            self.is_by_worth = by_worth.num_found > least

    def _put(self, page: int, where: int) -> None:
        self._list_of[page] = where
        self._lists[where][page] = None
        if where == IDLE and self._trials:
            self._by_worth.add(page, worth_of(self._hits[page], self._weights[page] or WEIGHT))

    def _take_out(self, page: int) -> None:
        where = self._list_of[page]
        del self._lists[where][page]
        if where == IDLE and self._trials:
            del self._by_worth[page]

    def _move(self, page: int, where: int) -> None:
        self._take_out(page)
        self._put(page, where)

    # ── snapshots ──

    def state(self) -> IdleState:
        hits = [
            (page, hits, self._weights[page]) for page, hits in enumerate(self._hits) if hits or self._weights[page]
        ]
        return IdleState(
            list(self._spent)[::-1],
            list(self._by_use),
            self._by_worth.levels(),
            list(self._kept),
            hits,
            list(self.keep.items()),
            [trial.state() for trial in self._trials],
            self._num_tried,
            self._num_requests,
            self.is_by_worth,
            self._by_worth.floor,
        )

    def restore(self, state: IdleState) -> None:
        for page, hits, weight in state.hits:
            self._hits[page], self._weights[page] = hits, weight
        for where, pages in ((SPENT, state.spent[::-1]), (IDLE, state.by_use), (KEPT, state.kept)):
            self._lists[where].update(dict.fromkeys(pages))
            for page in pages:
                self._list_of[page] = where
        self._by_worth.restore(state.by_worth, state.floor)
        self.count = sum(len(pages) for pages in self._lists)
        self.keep = dict(state.keep)
        for trial, saved in zip(self._trials, state.trials, strict=True):
            trial.restore(saved)
        self._num_tried, self._num_requests = state.num_tried, state.num_requests
        self.is_by_worth = state.is_by_worth


def _is_drawn(number: int) -> bool:
    """Spread evenly, and in step with no pattern of requests."""
    return (number * 0x9E3779B1 & 0xFFFFFFFF) >> 16 & (DRAWN - 1) == 0
