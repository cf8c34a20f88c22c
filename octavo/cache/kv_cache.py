"""KVCache: which pages hold which sequence's tokens. Every operation either succeeds completely or changes nothing and returns
None. Sequences are integers.

Layers with the same attention window form one or more groups (spec.PageLayout), and a sequence has a page table in each
group. All groups take pages from one pool: a page holds the tokens of one group's layers, and has the same size in all
groups. A group with a window frees pages that no later token sees. A cached prefix can serve such a group if the pages of
its last window are there."""

from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple

from octavo.cache.page_keys import KEY_BYTES, adapter_root, page_key
from octavo.cache.pool import NO_CHANGES, ChangeLog, PageChanges, PagePool
from octavo.cache.span import first_seen, most_held

ROOT = b""  # key of the empty prefix

MissReason = Literal["", "new", "evicted", "window", "short", "needed", "off"]
"""Why the prefix cache had no more of a prompt. Empty: it had all that can be shared. new: no prompt since the start
had the same tokens up to there, as far as is remembered. evicted: it had them, and needed their page. window: layers
with a window have freed them. short: the prompt does not fill a page. needed: the request's prompt must be computed
(logprobs of the prompt, or an embedding). off: there is no prefix cache."""


class Admission(NamedTuple):
    """Pages for an admitted sequence."""

    num_cached: int  # leading tokens whose keys and values the prefix cache has
    pages: list[list[int]]  # its page table in each group; 0 for entries that are out of the window
    miss: MissReason = ""  # why no more was found


class Growth(NamedTuple):
    """Changes to a sequence's page table in one group, after which it may write up to the requested length."""

    entries: list[int]  # ┐ entries of the page table that changed
    pages: list[int]  # ┘ and their new pages
    copied: int | None  # page whose content must first be copied to pages[0] (copy on write), if any


class Transfer(NamedTuple):
    """Pages to copy between the device and the host, pairwise."""

    device: list[int]
    host: list[int]
    pages: list[list[int]]  # swap_in: the sequence's new page tables; swap_out: empty list


class _PromptKeys(NamedTuple):
    root: bytes
    content: bytes  # its tokens, eight bytes each
    keys: list[bytes]  # of its full pages, without the last token


class PageTable:
    """A sequence's pages in one group: entry i of the table is pages[i − first]; entries before `first` were freed."""

    __slots__ = ("first", "found", "pages")

    def __init__(self, first: int, pages: list[int]) -> None:
        self.first, self.pages = first, pages
        self.found = 0  # entries before this came from the prefix cache: they were shared once and may be again

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def part(self, first: int, end: int) -> list[int]:
        """Return entries first … end − 1."""
        assert self.first <= first, "a page that a window has passed is asked for"
        return self.pages[first - self.first : end - self.first]

    def padded(self) -> list[int]:
        return [0] * self.first + self.pages


class KVCache:
    _reuses_keys = True  # False: every key is asked for by _key(), also those of pages that the prompt before had

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        prefix_caching: bool = True,
        num_warm_pages: int | None = None,
        windows: tuple[int, ...] = (0,),
        max_step_tokens: int = 1,
        root: bytes = ROOT,
        eviction: str = "lru",
    ) -> None:
        """`windows`: one per group; 0: the group keeps all pages. `max_step_tokens`: most tokens that a step computes of one
        sequence. `num_pages` 0 is for a model that keeps nothing between steps: every sequence fits and owns no page. `root`:
        start of the hash chain of page keys; if it is secret, a key reveals nothing about its tokens."""
        self.pool = PagePool(num_pages, num_warm_pages, eviction, page_size)
        self.page_size = page_size
        self.windows, self.max_step_tokens = windows, max_step_tokens
        self.prefix_caching = prefix_caching and num_pages > 0
        self.tables: dict[int, list[PageTable]] = {}
        self.num_host_pages = num_host_pages
        self.host_free = list(range(num_host_pages))
        self.loads: dict[int, list[int]] = {}  # ticket → pages that are being filled from a tier, and those before them
        self.host_tables: dict[int, list[PageTable]] = {}  # swapped-out sequences: where their pages are
        self._is_single_group = windows == (0,)  # without a window
        self._has_windows = any(windows)
        self._spans = [most_held(window, max_step_tokens, page_size) if window else None for window in windows]
        # All groups use the same key for a prefix; each group adds its own tag.
        self._tags = [bytes([group]) if group else b"" for group in range(len(windows))]
        self._published: dict[int, tuple[int, bytes]] = {}  # sequence → (full pages published, key of the last)
        self._roots: dict[
            int, bytes
        ] = {}  # sequence → root of its page keys, where that is not `root`: it has an adapter
        self._head: tuple[int, int, list[bytes]] = (
            -1,
            0,
            [],
        )  # (sequence, length, page keys) of the last admission attempt
        self._last_prompt = _PromptKeys(root, b"", [])
        self.root = root
        self.keys_made: list[bytes] | None = None  # keys computed since the recorder last took them; None: not recorded
        self.queried_tokens = 0
        self.hit_tokens = 0

    # ── operations ──

    def admit(
        self, sequence: int, tokens: list[int], spare: int = 0, *, reuse: bool = True, adapter: str = ""
    ) -> Admission | None:
        """Allocate pages for all of `tokens` (in a group with a window: for the window and one step), leaving at least `spare`
        pages free. None: they do not fit now. `reuse` False: ignore the prefix cache; all tokens will be computed. `adapter`: what keys and
        values are computed with, beside the model: sequences share pages only with those that have the same."""
        root = self._root_of(sequence, adapter)
        num_found, key = self._match(sequence, tokens, root) if reuse else (0, root)
        num_cached = num_found * self.page_size
        tables, fresh = self._lay_out(len(tokens), num_found)
        if any(fresh) and self._num_missing(tables, fresh) + spare > 0:
            return None
        miss = self._miss(num_found, reuse)
        for table in tables:
            self.pool.share(table.pages)
            self.pool.cached.note_found(table.pages)
        is_drawn = reuse and self.prefix_caching and self.pool.cached.look_up(self._head[2])
        for table, count in zip(tables, fresh, strict=True):
            table.pages += self.pool.take(count)
            if is_drawn:
                self.pool.cached.note_found(table.pages)
        self.tables[sequence] = tables
        self._published[sequence] = (num_found, key)
        if adapter:
            self._roots[sequence] = root
        if self.prefix_caching:
            self.queried_tokens += len(tokens)
            self.hit_tokens += num_cached
        return Admission(num_cached, [table.padded() for table in tables], miss)

    def extend(self, sequence: int, start: int, end: int) -> list[Growth] | None:
        """Make positions start … end − 1 writable in each group: append new pages, and replace the page at `start` by a private
        copy if it is shared or published. Free pages that no token from `start` on sees. None: too few free pages."""
        tables = self.tables[sequence]
        first, needed = start // self.page_size, self._pages_for(end)
        if self._is_single_group:  # fast path of most models: a decoding row comes here once per page
            own = tables[0].pages
            is_shared = first < len(own) and self._is_shared(own[first])
            if max(needed - len(own), 0) + is_shared > self.pool.num_free:
                return None
            return [self._grow(tables[0], first, needed, is_shared)]
        behind = [self._behind(group, table, start) for group, table in enumerate(tables)]
        shared = [first < table.end and self._is_shared(table.pages[first - table.first]) for table in tables]
        wanted = sum(max(needed - table.end, 0) for table in tables) + sum(shared)
        if wanted > self.pool.num_free + sum(self.pool.refs[page] == 1 for pages in behind for page in pages):
            return None
        for table, pages in zip(tables, behind, strict=True):
            if pages:
                # Pages from the middle of a long prompt must not evict pages that others may share; pages that were
                # found in the prefix cache may.
                self.pool.give(pages, are_spent=table.first >= table.found)
                table.first += len(pages)
                del table.pages[: len(pages)]
        return [self._grow(table, first, needed, copies) for table, copies in zip(tables, shared, strict=True)]

    def shrink(self, sequence: int, num_tokens: int) -> None:
        """Give back pages beyond the first `num_tokens`: drafts were written to them and not accepted. None of these was ever
        published."""
        needed = self._pages_for(num_tokens)
        for table in self.tables[sequence]:
            if table.end > needed:
                at = max(needed - table.first, 0)
                self.pool.give(table.pages[at:])
                del table.pages[at:]

    def fork(self, parent: int, child: int, num_tokens: int) -> list[list[int]]:
        """Let the child share the parent's pages of the first `num_tokens`; extend() copies a shared page before a write.
        Returns the child's page tables."""
        tables = [self._needed(group, table, num_tokens) for group, table in enumerate(self.tables[parent])]
        for table in tables:
            self.pool.share(table.pages)
        self.tables[child] = tables
        done, _ = self._published[parent]
        root = self._roots.get(parent, self.root)
        if root is not self.root:
            self._roots[child] = root
        self._published[child] = self._published[parent] if done <= num_tokens // self.page_size else (0, root)
        return [table.padded() for table in tables]

    def publish(self, sequence: int, tokens: list[int], computed: int) -> None:
        """Add the full pages among the first `computed` tokens to the prefix cache."""
        if not self.prefix_caching:
            return
        done, key = self._published[sequence]
        end = computed // self.page_size
        if end <= done:
            return
        tables, keys = self.tables[sequence], self._new_keys(key, tokens, done, end)
        if self._is_single_group:
            pages, publish = tables[0].pages, self.pool.publish
            for i, key in enumerate(keys, done):
                publish(pages[i], key)
        else:
            for i, key in enumerate(keys, done):
                self._publish(tables, i, key)
        self._published[sequence] = (end, keys[-1])

    def swap_out(self, sequence: int, num_tokens: int) -> Transfer | None:
        """Assign host pages to what is still needed of the first `num_tokens`, and free the sequence's device pages. None: too
        few host pages."""
        needed = [self._needed(group, table, num_tokens) for group, table in enumerate(self.tables[sequence])]
        if sum(len(table.pages) for table in needed) > len(self.host_free):
            return None
        hosts = [PageTable(table.first, [self.host_free.pop() for _ in table.pages]) for table in needed]
        self.host_tables[sequence] = hosts
        self._drop(sequence)
        return Transfer(_pages_in(needed), _pages_in(hosts), [])

    def swap_in(self, sequence: int, length: int, spare: int = 0) -> Transfer | None:
        """Bring a swapped-out sequence back, with pages for `length` tokens (in a group with a window: for the window and one
        step). None: it does not fit now."""
        hosts = self.host_tables[sequence]
        needed = [self._room(group, host.first, length) - host.first for group, host in enumerate(hosts)]
        if sum(needed) + spare > self.pool.num_free:
            return None
        del self.host_tables[sequence]
        tables = [PageTable(host.first, self.pool.take(count)) for host, count in zip(hosts, needed, strict=True)]
        self.tables[sequence] = tables
        self._published[sequence] = (0, self._roots.get(sequence, self.root))
        host_pages = _pages_in(hosts)
        self.host_free += host_pages
        device_pages = [page for t, host in zip(tables, hosts, strict=True) for page in t.pages[: len(host.pages)]]
        return Transfer(device_pages, host_pages, [table.padded() for table in tables])

    def begin_load(self, ticket: int, held: list[bytes], count: int) -> list[int] | None:
        """Take `count` pages, to be filled from a tier with the pages that follow those of the keys `held`, which stay until
        end_load(). None: fewer are free."""
        assert self._is_single_group, "tiers keep pages of models without windows"
        before = [self.pool.index[key] for key in held]
        num_idle = sum(self.pool.refs[page] == 0 for page in before)
        if not self.prefix_caching or count > self.pool.num_free - num_idle:
            return None
        self.pool.share(before)
        pages = self.pool.take(count)
        self.loads[ticket] = before + pages
        return pages

    def end_load(self, ticket: int, count: int, keys: list[bytes]) -> None:
        """The first of the load's `count` pages hold the pages of these keys, and can be found from now on. The others are free again."""
        pages = self.loads.pop(ticket)
        for page, key in zip(pages[len(pages) - count :], keys, strict=False):
            self.pool.publish(page, key)
        self.pool.give(pages)

    def hold(self, keys: list[bytes]) -> None:
        """Evict the pages of these keys after all others, from now on; those that are not there yet as well. Undone by let_go()."""
        self.pool.cached.hold(keys, self.pool.index)

    def let_go(self, keys: list[bytes]) -> None:
        self.pool.cached.let_go(keys, self.pool.index)

    def release(self, sequence: int) -> None:
        """Free everything the sequence owns, on the device or on the host."""
        self._roots.pop(sequence, None)
        if sequence in self.tables:
            self._drop(sequence)
        else:
            self.host_free += _pages_in(self.host_tables.pop(sequence))

    # ── queries ──

    def capacity(self, sequence: int) -> int:
        """Number of positions that have pages in every group (except positions that are out of a group's window)."""
        tables = self.tables[sequence]
        return (len(tables[0].pages) if self._is_single_group else min(table.end for table in tables)) * self.page_size

    def sees(self, sequence: int, position: int) -> bool:
        """Whether the sequence still holds every page that a token at `position` sees, on the device or on the host. False: a
        window has passed one of them."""
        tables = self.tables.get(sequence) or self.host_tables[sequence]
        return not self._has_windows or all(
            table.first <= first_seen(position, window, self.page_size)
            for table, window in zip(tables, self.windows, strict=True)
        )

    def num_missing(self, sequence: int, tokens: list[int], *, reuse: bool = True, adapter: str = "") -> int:
        """How many pages must become free before admit(), or swap_in() of a sequence that is swapped out, can succeed without spare
        ones. At most 0: none."""
        if sequence in self.host_tables:
            hosts = enumerate(self.host_tables[sequence])
            needed = (self._room(group, host.first, len(tokens)) - host.first for group, host in hosts)
            return sum(needed) - self.pool.num_free
        root = self._root_of(sequence, adapter)
        num_found, _ = self._match(sequence, tokens, root) if reuse else (0, root)
        return self._num_missing(*self._lay_out(len(tokens), num_found))

    def next_key(self, sequence: int, tokens: list[int], adapter: str = "") -> bytes | None:
        """The key of the first page that the prefix cache lacks of these tokens, in a group without a window. None: it lacks none that
        can be shared."""
        keys = self._keys(sequence, tokens, self._root_of(sequence, adapter))
        tag = self._tags[self.windows.index(0)]
        return next((key + tag for key in keys if key + tag not in self.pool.index), None)

    @property
    def num_host_used(self) -> int:
        return sum(len(table.pages) for tables in self.host_tables.values() for table in tables)

    def reset_prefixes(self) -> int:
        """Clear the prefix cache and return the number of pages that it held. Sequences alive now do not publish again the
        pages they have published."""
        return self.pool.forget_all()

    # ── what a router hears ──

    def watch_pages(self) -> None:
        """Log from now on which pages become findable or are evicted."""
        self.pool.changes = ChangeLog()

    def ignore_pages(self) -> None:
        self.pool.changes = None

    def take_changes(self) -> PageChanges:
        """Changes since the last call, by the keys of the group that a router hears of."""
        log = self.pool.changes
        if log is None:
            return NO_CHANGES
        changes = log.take()
        if changes is NO_CHANGES or len(self.windows) == 1:
            return changes
        return PageChanges(self._keys_heard(changes.stored), self._keys_heard(changes.evicted))

    def findable_keys(self) -> list[bytes]:
        """Keys of all pages in the prefix cache, of the group that a router hears of."""
        return self._keys_heard(self.pool.index)

    def _keys_heard(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the first group without a window: a prefix is usable only as far as this group has it. If all groups have
        windows, those of the first."""
        if len(self._tags) == 1:
            return [*keys]
        tag = self._tags[self.windows.index(0) if 0 in self.windows else 0]
        end = KEY_BYTES + len(tag)
        return [key[:KEY_BYTES] for key in keys if len(key) == end and key.endswith(tag)]

    # ── helpers ──

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.pool.num_pages else 0

    def _room(self, group: int, first: int, num_tokens: int) -> int:
        """End of a table that begins at `first` and has pages for `num_tokens`, or for what a window and one step need."""
        total, span = self._pages_for(num_tokens), self._spans[group]
        return total if span is None else min(total, first + span)

    def _lay_out(self, num_tokens: int, num_found: int) -> tuple[list[PageTable], list[int]]:
        """The tables of a sequence whose first `num_found` pages are cached: these pages, and how many more each table needs."""
        tables = [self._found(group, num_found * self.page_size) for group in range(len(self.windows))]
        fresh = [self._room(group, table.first, num_tokens) - num_found for group, table in enumerate(tables)]
        return tables, fresh

    def _num_missing(self, tables: list[PageTable], fresh: list[int]) -> int:
        """Pages that the tables lack beyond the free ones. Cached pages that are idle count as free until they are shared."""
        refs = self.pool.refs
        idle = sum([refs[page] for page in table.pages].count(0) for table in tables)
        return sum(fresh) + idle - self.pool.num_free

    def _needed(self, group: int, table: PageTable, num_tokens: int) -> PageTable:
        """The part of a table that the token after `num_tokens` sees."""
        first = first_seen(num_tokens, self.windows[group], self.page_size)
        return PageTable(first, table.part(first, self._pages_for(num_tokens)))

    def _behind(self, group: int, table: PageTable, start: int) -> list[int]:
        """Pages that no token from `start` on sees."""
        window = self.windows[group]
        return table.pages[: first_seen(start, window, self.page_size) - table.first] if window else []

    def _grow(self, table: PageTable, first: int, needed: int, copies: bool) -> Growth:
        entries = list(range(table.first + len(table.pages), needed))
        pages, copied = self.pool.take(len(entries)), None
        table.pages += pages
        if copies:
            at = first - table.first
            copied = table.pages[at]
            table.pages[at] = self.pool.take(1)[0]
            self.pool.give([copied])
            entries.insert(0, first)
            pages = [table.pages[at], *pages]
        return Growth(entries, pages, copied)

    def _publish(self, tables: list[PageTable], i: int, key: bytes) -> None:
        for table, tag in zip(tables, self._tags, strict=True):
            if i >= table.first:  # else the page is out of the window and was freed
                self.pool.publish(table.pages[i - table.first], key + tag)

    def _is_shared(self, page: int) -> bool:
        return self.pool.refs[page] > 1 or self.pool.keys[page] is not None

    def _drop(self, sequence: int) -> None:
        del self._published[sequence]
        tables = self.tables.pop(sequence)
        if len(tables) == 1:
            self.pool.give(tables[0].pages)
            return
        # By position, not by group: when a prefix is evicted from its tail, the rest stays usable only if all groups have it.
        entries = [(i, page) for table in tables for i, page in enumerate(table.pages, table.first)]
        self.pool.give([page for _, page in sorted(entries)])

    def _root_of(self, sequence: int, adapter: str) -> bytes:
        """The root of a sequence's page keys."""
        return self._roots.get(sequence) or adapter_root(self.root, adapter) if adapter else self.root

    def _match(self, sequence: int, tokens: list[int], root: bytes) -> tuple[int, bytes]:
        """Find the longest prefix that every group has cached: (pages, key). A group without a window needs all of its pages."""
        if not self.prefix_caching:
            return 0, root
        keys, index = self._keys(sequence, tokens, root), self.pool.index
        found = len(keys)
        if self._is_single_group:
            pages = list(map(index.get, keys))
            found = pages.index(None) if None in pages else found
            return found, keys[found - 1] if found else root
        for window, tag in zip(self.windows, self._tags, strict=True):
            if not window:
                found = next((i for i in range(found) if keys[i] + tag not in index), found)
        while self._has_windows and (missing := self._last_missing(found, keys)) is not None:
            found = missing  # any prefix between `missing` and `found` pages needs that page too
        return found, keys[found - 1] if found else root

    def _miss(self, num_found: int, reuse: bool) -> MissReason:
        """Why _match() found no more than this."""
        if not self.prefix_caching:
            return "off"
        if not reuse:
            return "needed"
        keys = self._head[2]
        if num_found == len(keys):
            return "" if keys else "short"
        lacking = [keys[num_found] + tag for tag in self._tags if keys[num_found] + tag not in self.pool.index]
        if any(map(self.pool.was_evicted, lacking)):
            return "evicted"
        return "new" if len(lacking) == len(self._tags) else "window"

    def _last_missing(self, num_pages: int, keys: list[bytes]) -> int | None:
        """The last page that a prefix of `num_pages` lacks in a group with a window; None: it lacks none."""
        index, num_tokens = self.pool.index, num_pages * self.page_size
        pairs = zip(self.windows, self._tags, strict=True)
        needs = [(first_seen(num_tokens, window, self.page_size), tag) for window, tag in pairs if window]
        for at in range(num_pages - 1, min((first for first, _ in needs), default=num_pages) - 1, -1):
            if any(at >= first and keys[at] + tag not in index for first, tag in needs):
                return at
        return None

    def _found(self, group: int, num_cached: int) -> PageTable:
        """A group's cached pages of the prefix that _match() found."""
        tag, keys, index = self._tags[group], self._head[2], self.pool.index
        window, end = self.windows[group], num_cached // self.page_size
        first = first_seen(num_cached, window, self.page_size) if window else 0
        table = PageTable(first, [index[keys[i] + tag] for i in range(first, end)])
        table.found = end
        return table

    def _keys(self, sequence: int, tokens: list[int], root: bytes) -> list[bytes]:
        """Keys of the pages that may be shared. Cached for one sequence: the head of the queue asks again at every step."""
        if self._head[:2] != (sequence, len(tokens)):
            # −1: the last token is always computed, to sample after it.
            num_pages = (len(tokens) - 1) // self.page_size
            if self._reuses_keys:
                keys = self._keys_after_last(root, tokens, num_pages)
            else:
                keys = self._new_keys(root, tokens, 0, num_pages)
            self._head = (sequence, len(tokens), keys)
        return self._head[2]

    def _keys_after_last(self, root: bytes, tokens: list[int], num_pages: int) -> list[bytes]:
        """Keys of a prompt's first pages. Those of pages that the prompt before began with as well are not computed again: prompts that
        share a prefix often follow each other, and comparing bytes takes a hundredth of the time of hashing them."""
        content, step = array("q", tokens).tobytes(), 8 * self.page_size
        last = self._last_prompt
        same, beyond = 0, min(num_pages, len(last.keys)) + 1 if last.root == root else 1
        while beyond - same > 1:  # `same` pages are the same, and `beyond` are not
            middle = (same + beyond) // 2
            if content[: middle * step] == last.content[: middle * step]:
                same = middle
            else:
                beyond = middle
        keys = last.keys[:same]
        if self.keys_made is not None:
            self.keys_made += keys
        keys += self._new_keys(keys[-1] if keys else root, tokens, same, num_pages)
        self._last_prompt = _PromptKeys(root, content, keys)
        return keys

    def _new_keys(self, parent: bytes, tokens: list[int], first: int, end: int) -> list[bytes]:
        """Keys of the pages from `first` to before `end`. `parent`: the key of the page before them."""
        keys, key = [], parent
        for i in range(first, end):
            key = self._key(key, tokens, i)
            keys.append(key)
        return keys

    def _key(self, parent: bytes, tokens: list[int], i: int) -> bytes:
        """Key of page i (page_keys.py)."""
        content = array("q", tokens[i * self.page_size : (i + 1) * self.page_size]).tobytes()
        key = page_key(parent, content)
        if self.keys_made is not None:
            self.keys_made.append(key)
        return key


def _pages_in(tables: list[PageTable]) -> list[int]:
    return [page for table in tables for page in table.pages]
