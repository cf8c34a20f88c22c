"""IdlePages: the pages of the prefix cache that have no owner, and which of them is evicted next.

In this order: pages that are unlikely to be shared; pages that were not found again since they were computed, and those that were demoted; pages that were
found again (protected); pages that are kept for a while because a client asked for it. Within each, the least recently used goes first.

Protection helps where the same prefixes come again after more other pages than the store holds, and harms where only the latest ones do. So it is
tried out on keys alone: two small caches that hold a sample of the keys, one with protection and one without, count what they would have found, and the
pages follow the better one. Nothing here depends on a clock: the same requests in the same order evict the same pages."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

POLICIES = ("adaptive", "lru")
"""lru: no page is protected."""

PROTECTED_SHARE = 0.5  # of all pages: most that are protected
SMALL_STORE = 1024  # pages; of larger stores only a sample of the keys is tried out
SAMPLED = 8  # one key of so many
DRAWN = 8  # one request of so many is protected though it comes for the first time: else nothing would be where nothing is found
LEAST_GAIN = 1.5  # protection begins where it finds so many times more …
LEAST_MORE = 0.125  # … and so many more, as a share of the pages …
KEPT_GAIN = 1.2  # … and ends where it does not find so many times more: each change costs some pages
SPENT, RECENT, PROTECTED, KEPT = range(4)


class TrialState(msgspec.Struct, array_like=True, gc=False):
    """The keys of one of the two caches on trial, in the order in which they would be evicted."""

    recent: list[bytes]
    protected: list[bytes]
    num_found: float


class IdleState(msgspec.Struct, array_like=True, gc=False):
    """As lists of pages, each in the order in which they will be evicted; and what decides about protection."""

    spent: list[int]
    recent: list[int]
    protected: list[int]
    kept: list[int]
    found: list[int]  # pages that were found since they last became idle
    keep: list[tuple[bytes, int]]
    trials: list[TrialState]  # none: the policy is lru
    num_tried: float
    num_requests: int
    is_protecting: bool


class _Trial:
    """Which of the keys a cache of `capacity` keys would have found. `share`: of it, for keys that were found before."""

    __slots__ = ("num_found", "protected", "recent", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.recent: OrderedDict[bytes, None] = OrderedDict()
        self.protected: OrderedDict[bytes, None] = OrderedDict()
        self.num_found = 0.0

    def look_up(self, keys: list[bytes], capacity: int, is_drawn: bool) -> None:
        """A request's keys. It finds those before the first that is missing. `is_drawn`: all of them are protected."""
        recent, protected = self.recent, self.protected
        num_found = next((at for at, key in enumerate(keys) if key not in recent and key not in protected), len(keys))
        self.num_found += num_found
        found = keys[:num_found]
        new = [key for key in keys[num_found:] if key not in recent and key not in protected]
        for key in found:
            del (recent if key in recent else protected)[key]
        excess = len(recent) + len(protected) + len(found) + len(new) - capacity
        for _ in range(min(excess, len(recent) + len(protected))):
            (recent or protected).popitem(last=False)
        # From the last page to the first: the head of a prefix is evicted last.
        new.reverse()
        found.reverse()
        (protected if is_drawn and self.share else recent).update(dict.fromkeys(new))
        (protected if self.share else recent).update(dict.fromkeys(found))
        for _ in range(len(protected) - int(self.share * capacity)):
            recent[protected.popitem(last=False)[0]] = None


class IdlePages:
    def __init__(self, num_pages: int, policy: str = "lru") -> None:
        assert policy in POLICIES
        self.capacity = num_pages  # pages that the cache may use, idle or not
        self.count = 0
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._lists = (self._spent, self._recent, self._protected, self._kept)
        self._list_of = bytearray(num_pages)
        self._found = bytearray(num_pages)  # 1: found by a request since it last became idle
        self.keep: dict[bytes, int] = {}  # keys of pages that are evicted last → how often that was asked for
        self._trials = [_Trial(0.0), _Trial(PROTECTED_SHARE)] if policy == "adaptive" else []
        self._num_tried = 0.0
        self._num_requests = 0
        self.is_protecting = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        """In the order in which they will be evicted."""
        spent, *others = self._lists
        yield from reversed(spent)
        for pages in others:
            yield from pages

    def __contains__(self, page: int) -> bool:
        return page in self._lists[self._list_of[page]]

    def __delitem__(self, page: int) -> None:
        """It has an owner again."""
        del self._lists[self._list_of[page]][page]
        self.count -= 1

    def add(self, page: int, key: bytes, is_spent: bool = False) -> None:
        """It has no owner any more. `is_spent`: it is evicted before all others."""
        self.count += 1
        is_found, self._found[page] = self._found[page], 0
        if self.keep and key in self.keep:
            self._put(page, KEPT)
        elif is_spent:
            self._put(page, SPENT)
        elif is_found and self.is_protecting:
            self._put(page, PROTECTED)
            self._demote(int(PROTECTED_SHARE * self.capacity))
        else:
            self._recent[page] = None
            self._list_of[page] = RECENT

    def pop(self) -> int:
        """Take the page that is worth least."""
        assert self.count, "no page is idle"
        self.count -= 1
        if self._spent:
            return self._spent.popitem()[0]
        return (self._recent or self._protected or self._kept).popitem(last=False)[0]

    def clear(self) -> None:
        for pages in self._lists:
            pages.clear()
        self.count = 0
        self._found = bytearray(len(self._found))
        for trial in self._trials:
            trial.recent.clear()
            trial.protected.clear()

    def note_found(self, pages: Iterable[int]) -> None:
        """A request found these pages in the prefix cache."""
        found = self._found
        for page in pages:
            found[page] = 1

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
                self._move(page, RECENT)

    # ── whether protection helps ──

    def look_up(self, keys: list[bytes]) -> bool:
        """A request asks for the pages of these keys. → whether those that it computes are to be protected, too (note_found)."""
        if not self._trials:
            return False
        self._num_requests += 1
        is_drawn = _is_drawn(self._num_requests)
        self._try_out(keys, is_drawn)
        return is_drawn and self.is_protecting

    def _try_out(self, keys: list[bytes], is_drawn: bool) -> None:
        if self.capacity > SMALL_STORE:
            keys = [key for key in keys if not key[0] % SAMPLED]
            capacity = self.capacity // SAMPLED
        else:
            capacity = self.capacity
        if not keys:
            return
        keys = keys[:capacity]
        plain, protecting = self._trials
        plain.look_up(keys, capacity, is_drawn)
        protecting.look_up(keys, capacity, is_drawn)
        self._num_tried += len(keys)
        if self._num_tried > 16 * capacity:
            self._num_tried /= 2
            plain.num_found /= 2
            protecting.num_found /= 2
        if self.is_protecting:
            if protecting.num_found < KEPT_GAIN * plain.num_found:
                self.is_protecting = False
                self._demote(0)
        elif protecting.num_found > LEAST_GAIN * plain.num_found + LEAST_MORE * capacity:
            self.is_protecting = True

    def _demote(self, most: int) -> None:
        protected, recent = self._protected, self._recent
        for _ in range(len(protected) - most):
            page = protected.popitem(last=False)[0]
            recent[page] = None
            self._list_of[page] = RECENT

    def _put(self, page: int, where: int) -> None:
        self._lists[where][page] = None
        self._list_of[page] = where

    def _move(self, page: int, where: int) -> None:
        del self._lists[self._list_of[page]][page]
        self._put(page, where)

    # ── snapshots ──

    def state(self) -> IdleState:
        spent, recent, protected, kept = (list(pages) for pages in self._lists)
        trials = [TrialState(list(each.recent), list(each.protected), each.num_found) for each in self._trials]
        found = [page for page, is_found in enumerate(self._found) if is_found]
        keep = list(self.keep.items())
        return IdleState(
            spent[::-1],
            recent,
            protected,
            kept,
            found,
            keep,
            trials,
            self._num_tried,
            self._num_requests,
            self.is_protecting,
        )

    def restore(self, state: IdleState) -> None:
        for where, pages in enumerate((state.spent[::-1], state.recent, state.protected, state.kept)):
            for page in pages:
                self._put(page, where)
                self.count += 1
        for page in state.found:
            self._found[page] = 1
        self.keep = dict(state.keep)
        for trial, saved in zip(self._trials, state.trials, strict=True):
            trial.recent = OrderedDict.fromkeys(saved.recent)
            trial.protected = OrderedDict.fromkeys(saved.protected)
            trial.num_found = saved.num_found
        self._num_tried, self._num_requests = state.num_tried, state.num_requests
        self.is_protecting = state.is_protecting


def _is_drawn(number: int) -> bool:
    """Spread evenly, and in step with no pattern of requests."""
    return (number * 0x9E3779B1 & 0xFFFFFFFF) >> 16 & (DRAWN - 1) == 0
