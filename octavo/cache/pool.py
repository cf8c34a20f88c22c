"""PagePool: reference counts of pages, and the prefix cache's index of pages that have no owner but are worth keeping."""

from collections import OrderedDict, deque


class PagePool:
    """Reference-counted pages. A published page without an owner stays findable until it is evicted, oldest first.

    Every page is in exactly one of three states: owned (refs > 0), cached (no owner, has a key) or blank.

    The system may not yet have provided memory for a page that was never used. So that cached pages alone do not make memory
    grow, a page beyond the first `num_warm` is used for the first time only if no cached page can be evicted."""

    def __init__(self, num_pages: int, num_warm: int | None = None) -> None:
        self.num_pages = num_pages
        self._num_warm = num_pages if num_warm is None else num_warm
        self.num_touched = 0  # pages below this have been used
        self.refs = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.index: dict[bytes, int] = {}
        self.blank: deque[int] = deque(range(num_pages))  # pages that have been used come first
        self.cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Take `count` pages for one new owner: blank pages first, then the least recently used cached ones. The caller has
        checked num_free."""
        pages = [self._take_blank() if self._prefers_blank() else self._evict() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def _prefers_blank(self) -> bool:
        if not self.blank or not self.cached:
            return bool(self.blank)
        return self.blank[0] < self.num_touched or self.num_touched < self._num_warm

    def _take_blank(self) -> int:
        page = self.blank.popleft()
        self.num_touched = max(self.num_touched, page + 1)
        return page

    def share(self, page: int) -> None:
        if self.refs[page] == 0:
            del self.cached[page]
        self.refs[page] += 1

    def give(self, pages: list[int], are_spent: bool = False) -> None:
        """Drop one owner of the pages. Tail first: the head of a prefix is its most reusable part and must be evicted last.
        `are_spent`: the pages are unlikely to be shared, and are evicted before all pages cached so far."""
        for page in reversed(pages):
            self.refs[page] -= 1
            assert self.refs[page] >= 0, "page released twice"
            if self.refs[page] == 0:
                if self.keys[page] is None:
                    self.blank.appendleft(page)
                else:
                    self.cached[page] = None
                    if are_spent:
                        self.cached.move_to_end(page, last=False)

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable under `key`. If another page already has the key, this one stays private."""
        if self.keys[page] is None and key not in self.index:
            self.keys[page], self.index[key] = key, page

    def forget_all(self) -> int:
        """Unpublish every page and return how many there were."""
        forgotten = len(self.index)
        for page in self.index.values():
            self.keys[page] = None
        self.index.clear()
        self.blank.extendleft(self.cached)
        self.cached.clear()
        return forgotten

    def _evict(self) -> int:
        page, _ = self.cached.popitem(last=False)
        key = self.keys[page]
        assert key is not None
        del self.index[key]
        self.keys[page] = None
        return page
