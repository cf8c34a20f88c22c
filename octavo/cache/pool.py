"""PagePool: reference counts of pages, and the prefix cache's index of pages that have no owner but are worth keeping."""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from octavo.cache.eviction import IdlePages

MAX_REMEMBERED = 2**14  # evicted keys, and at least half as many


class PageChanges(NamedTuple):
    """Keys that became findable in the prefix cache, and keys that no longer are. No key is in both."""

    stored: Collection[bytes]
    evicted: Collection[bytes]


NO_CHANGES = PageChanges((), ())


class ChangeLog:
    """The net changes to the prefix cache's keys since the last take(). Bounded by the number of pages, however long it is not taken."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def store(self, key: bytes) -> None:
        if key in self._evicted:
            del self._evicted[key]
        else:
            self._stored[key] = None

    def evict(self, key: bytes) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._evicted[key] = None

    def add(self, changes: PageChanges) -> None:
        """What another log has taken."""
        for key in changes.evicted:
            self.evict(key)
        if not self._evicted:
            self._stored.update(dict.fromkeys(changes.stored))
            return
        for key in changes.stored:
            self.store(key)

    def take(self) -> PageChanges:
        if not self._stored and not self._evicted:
            return NO_CHANGES
        changes = PageChanges(self._stored, self._evicted)
        self._stored, self._evicted = {}, {}
        return changes


class PagePool:
    """Reference-counted pages. A published page without an owner stays findable until it is evicted (eviction.py).

    Every page is in exactly one of three states: owned (refs > 0), cached (no owner, has a key) or blank.

    The system provides memory for a page when it is first used, and can get it back while the page is blank (untouch). So that
    cached pages alone do not make memory grow, a page beyond `num_warm` touched ones is touched only if no cached page can be
    evicted."""

    def __init__(self, num_pages: int, num_warm: int | None = None, policy: str = "lru", page_tokens: int = 16) -> None:
        self.num_pages = num_pages
        self.num_warm = num_pages if num_warm is None else min(num_warm, num_pages)
        self.num_touched = 0  # pages that have memory: all owned and cached ones, and the first of the blank ones
        self.refs = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.index: dict[bytes, int] = {}
        self.generations = [
            0
        ] * num_pages  # how often each page was unpublished: a copy taken meanwhile may be of anything
        self.blank: deque[int] = deque(range(num_pages))  # touched pages come first
        self.cached = IdlePages(num_pages, policy, page_tokens)
        self.cached.capacity = self.num_warm
        # Keys of the last pages that were evicted, the latest in the second set. No plan depends on them.
        self._evicted: tuple[set[bytes], set[bytes]] = (set(), set())
        self.changes: ChangeLog | None = None  # None: nothing listens, and nothing is logged

    @property
    def num_free(self) -> int:
        return len(self.blank) + self.cached.count

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Take `count` pages for one new owner: blank pages first, then those cached ones that are worth least. The caller has
        checked num_free."""
        if count <= len(self.blank) and (not self.cached.count or self.num_warm == self.num_pages):
            popleft = self.blank.popleft  # blank pages are preferred as long as there are some
            pages = [popleft() for _ in range(count)]
            self.num_touched = max(self.num_touched, self.num_pages - len(self.blank))
        else:
            pages = [self._take_blank() if self._prefers_blank() else self._evict() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def _prefers_blank(self) -> bool:
        if not self.blank or not self.cached.count:
            return bool(self.blank)
        return self._num_touched_blank > 0 or self.num_touched < self.num_warm

    @property
    def _num_touched_blank(self) -> int:
        return self.num_touched - (self.num_pages - len(self.blank))

    def _take_blank(self) -> int:
        if not self._num_touched_blank:
            self.num_touched += 1
        return self.blank.popleft()

    def limit_touched(self, num_warm: int) -> list[int]:
        """Let cached pages keep the touched ones at no more than `num_warm` from now on. Evicts cached pages down to that, and returns
        the blank pages whose memory can be given back: they count as never used."""
        self.num_warm = self.cached.capacity = min(num_warm, self.num_pages)
        excess = max(0, self.num_touched - self.num_warm)
        for _ in range(min(excess - self._num_touched_blank, len(self.cached))):
            self.blank.appendleft(self._evict())
        count = min(excess, self._num_touched_blank)
        pages = [self.blank.popleft() for _ in range(count)]
        self.blank.extend(pages)
        self.num_touched -= count
        return pages

    def share(self, pages: list[int]) -> None:
        """Add an owner of the pages."""
        refs = self.refs
        for page in pages:
            if refs[page] == 0:
                del self.cached[page]
            refs[page] += 1

    def give(self, pages: list[int], are_spent: bool = False) -> None:
        """Drop one owner of the pages. Tail first: the head of a prefix is its most reusable part and must be evicted last.
        `are_spent`: the pages are unlikely to be shared, and are evicted before all pages cached so far."""
        for page in reversed(pages):
            self.refs[page] -= 1
            assert self.refs[page] >= 0, "page released twice"
            if self.refs[page] == 0:
                key = self.keys[page]
                if key is None:
                    self.blank.appendleft(page)
                else:
                    self.cached.add(page, key, are_spent, len(pages))

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable under `key`. If another page already has the key, this one stays private."""
        if self.keys[page] is None and key not in self.index:
            self.keys[page], self.index[key] = key, page
            if self.changes is not None:
                self.changes.store(key)

    def forget_all(self) -> int:
        """Unpublish every page and return how many there were."""
        forgotten = len(self.index)
        for key, page in self.index.items():
            self.keys[page] = None
            self.generations[page] += 1
            if self.changes is not None:
                self.changes.evict(key)
        self.index.clear()
        self._evicted = (set(), set())
        self.blank.extendleft(self.cached)
        self.cached.clear()
        return forgotten

    def was_evicted(self, key: bytes) -> bool:
        """Whether a page with this key, which is not in the prefix cache, was there, as far as is remembered."""
        before, latest = self._evicted
        return key in latest or key in before

    def _evict(self) -> int:
        page = self.cached.pop()
        key = self.keys[page]
        assert key is not None
        del self.index[key]
        self.keys[page] = None
        self.generations[page] += 1
        latest = self._evicted[1]
        latest.add(key)
        if len(latest) >= MAX_REMEMBERED // 2:
            self._evicted = (latest, set())
        if self.changes is not None:
            self.changes.evict(key)
        return page
