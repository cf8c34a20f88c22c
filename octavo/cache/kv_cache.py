"""KVCache: which pages hold which sequence's tokens. Every verb succeeds whole or changes nothing and says so.
Knows nothing of tensors, clocks, rows or scheduling; sequences are integers."""

from array import array
from hashlib import blake2b
from typing import NamedTuple

from octavo.cache.pool import PagePool

ROOT = b""  # key of the empty prefix


class Admission(NamedTuple):
    """Room for a sequence was found."""

    num_cached: int  # leading tokens whose keys and values are already there
    pages: list[int]  # its whole page table


class Growth(NamedTuple):
    """A sequence may write up to the asked-for length."""

    slots: list[int]  # ┐ entries of its page table that changed
    pages: list[int]  # ┘ and what they are now
    copied: int | None  # the page whose content must be copied to pages[0] first (copy on write), if any


class Transfer(NamedTuple):
    """Pages to copy between the device and the host, pairwise."""

    device: list[int]
    host: list[int]
    pages: list[int]  # swap_in: the sequence's new page table; swap_out: empty


class KVCache:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        prefix_caching: bool = True,
        num_warm_pages: int | None = None,
    ) -> None:
        """`num_pages` 0: of a model that keeps nothing between steps. Every sequence fits, and owns no page."""
        self.pool = PagePool(num_pages, num_warm_pages)
        self.page_size = page_size
        self.prefix_caching = prefix_caching and num_pages > 0
        self.tables: dict[int, list[int]] = {}
        self.host_free = list(range(num_host_pages))
        self.host_tables: dict[int, list[int]] = {}  # swapped-out sequences
        self._published: dict[int, tuple[int, bytes]] = {}  # sequence → (full pages published, key of the last)
        self._head: tuple[int, int, list[bytes]] = (
            -1,
            0,
            [],
        )  # page keys of the last sequence that asked to be admitted
        self.queried_tokens = 0
        self.hit_tokens = 0

    # ── the verbs ──

    def admit(self, sequence: int, tokens: list[int], spare: int = 0, *, reuse: bool = True) -> Admission | None:
        """Room for all of `tokens`, leaving at least `spare` pages free. None: it does not fit now.
        `reuse` False: nothing that others published counts, all of it will be computed."""
        matched, key = self._match(sequence, tokens) if reuse else ([], ROOT)
        fresh = self._pages_for(len(tokens)) - len(matched)
        idle = sum(self.pool.refs[page] == 0 for page in matched)
        if fresh and fresh + spare > self.pool.num_free - idle:
            return None
        for page in matched:
            self.pool.share(page)
        table = matched + self.pool.take(fresh)
        self.tables[sequence] = table
        self._published[sequence] = (len(matched), key)
        num_cached = len(matched) * self.page_size
        if self.prefix_caching:
            self.queried_tokens += len(tokens)
            self.hit_tokens += num_cached
        return Admission(num_cached, list(table))

    def extend(self, sequence: int, start: int, end: int) -> Growth | None:
        """Make positions start … end − 1 writable: new pages at the tail, and a private copy of the page at `start`
        if others own it or it was published. None: too few free pages."""
        table = self.tables[sequence]
        first = start // self.page_size
        needed = self._pages_for(end)
        shared = first < len(table) and self._is_shared(table[first])
        if max(needed - len(table), 0) + shared > self.pool.num_free:
            return None
        slots, pages, copied = list(range(len(table), needed)), self.pool.take(max(needed - len(table), 0)), None
        table += pages
        if shared:
            copied = table[first]
            table[first] = self.pool.take(1)[0]
            self.pool.give([copied])
            slots.insert(0, first)
            pages = [table[first], *pages]
        return Growth(slots, pages, copied)

    def fork(self, parent: int, child: int, num_tokens: int) -> list[int]:
        """The child owns, with its parent, the pages of the first `num_tokens`; extend() copies what it would write to."""
        table = self.tables[parent][: self._pages_for(num_tokens)]
        for page in table:
            self.pool.share(page)
        self.tables[child] = table
        done, _ = self._published[parent]
        self._published[child] = self._published[parent] if done <= num_tokens // self.page_size else (0, ROOT)
        return list(table)

    def publish(self, sequence: int, tokens: list[int], computed: int) -> None:
        """Offer the full pages among the first `computed` tokens to later sequences."""
        if not self.prefix_caching:
            return
        done, key = self._published[sequence]
        table = self.tables[sequence]
        for i in range(done, computed // self.page_size):
            key = self._key(key, tokens, i)
            self.pool.publish(table[i], key)
            done = i + 1
        self._published[sequence] = (done, key)

    def swap_out(self, sequence: int, num_tokens: int) -> Transfer | None:
        """Move the first `num_tokens` to host pages and free the sequence's pages. None: too few host pages."""
        needed = self._pages_for(num_tokens)
        if needed > len(self.host_free):
            return None
        table = self.tables[sequence]
        host = [self.host_free.pop() for _ in range(needed)]
        self.host_tables[sequence] = host
        self._drop(sequence)
        return Transfer(table[:needed], list(host), [])

    def swap_in(self, sequence: int, length: int, spare: int = 0) -> Transfer | None:
        """Bring a swapped-out sequence back, with room for `length` tokens. None: it does not fit now."""
        needed = self._pages_for(length)
        if needed + spare > self.pool.num_free:
            return None
        host = self.host_tables.pop(sequence)
        table = self.pool.take(needed)
        self.tables[sequence] = table
        self._published[sequence] = (0, ROOT)
        self.host_free += host
        return Transfer(table[: len(host)], host, list(table))

    def release(self, sequence: int) -> None:
        """Let go of everything the sequence owns, on the device or on the host."""
        if sequence in self.tables:
            self._drop(sequence)
        else:
            self.host_free += self.host_tables.pop(sequence)

    # ── facts ──

    def capacity(self, sequence: int) -> int:
        """Tokens that the sequence's pages can hold."""
        return len(self.tables[sequence]) * self.page_size

    def reset_prefixes(self) -> int:
        """Forget every published page; sequences alive now publish nothing they computed before."""
        return self.pool.forget_all()

    # ── inside ──

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.pool.num_pages else 0

    def _is_shared(self, page: int) -> bool:
        return self.pool.refs[page] > 1 or self.pool.keys[page] is not None

    def _drop(self, sequence: int) -> None:
        del self._published[sequence]
        self.pool.give(self.tables.pop(sequence))

    def _match(self, sequence: int, tokens: list[int]) -> tuple[list[int], bytes]:
        pages: list[int] = []
        key = ROOT
        if self.prefix_caching:
            for next_key in self._keys(sequence, tokens):
                page = self.pool.index.get(next_key)
                if page is None:
                    break
                pages.append(page)
                key = next_key
        return pages, key

    def _keys(self, sequence: int, tokens: list[int]) -> list[bytes]:
        """Keys of the pages that may be shared. Remembered for one sequence: a queue's head asks again at every step."""
        if self._head[:2] != (sequence, len(tokens)):
            keys: list[bytes] = []
            key = ROOT
            for i in range(
                (len(tokens) - 1) // self.page_size
            ):  # −1: the last token is always computed, to sample after it
                key = self._key(key, tokens, i)
                keys.append(key)
            self._head = (sequence, len(tokens), keys)
        return self._head[2]

    def _key(self, parent: bytes, tokens: list[int], i: int) -> bytes:
        """A cryptographic chain: a client must not be able to craft a prompt that finds another prompt's pages."""
        content = array("q", tokens[i * self.page_size : (i + 1) * self.page_size]).tobytes()
        return blake2b(parent + content, digest_size=16).digest()
