"""PagePool: which pages are owned, by how many, and which ownerless ones still hold something worth keeping.
Knows nothing of requests, tokens or tensors."""

from collections import OrderedDict, deque


class PagePool:
    """Reference-counted pages. An ownerless page that was published stays findable until it is evicted, oldest first.

    Every page is in exactly one of three states: owned (refs > 0), cached (no owner, has a key) or blank.

    Memory of a page that was never taken may not have been taken from the system yet. So that what is only cached does not
    grow without need, no page beyond the first `num_warm` is taken for the first time while a cached one can be evicted."""

    def __init__(self, num_pages: int, num_warm: int | None = None) -> None:
        self.num_pages = num_pages
        self._num_warm = num_pages if num_warm is None else num_warm
        self.num_touched = 0  # pages below this were taken before
        self.refs = [0] * num_pages
        self.keys: list[bytes | None] = [None] * num_pages
        self.index: dict[bytes, int] = {}
        self.blank: deque[int] = deque(range(num_pages))  # those that were taken before come first
        self.cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` pages for one new owner: blank ones first, then the longest unused of the cached. The caller checked num_free."""
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
        """One owner lets go. Tail first: the head of a prefix is its most reusable part and must be evicted last.
        `are_spent`: they are hardly of use to others, and go before all that is cached already."""
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
        """Offer a full page under `key`. The first page published under a key stays; a later twin stays private."""
        if self.keys[page] is None and key not in self.index:
            self.keys[page], self.index[key] = key, page

    def forget_all(self) -> int:
        """Withdraw every published page; return how many there were."""
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
