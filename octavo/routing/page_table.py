"""PageTable: page id → the set of replicas that hold the page, in 12 bytes a slot.

A bucketed hash table in two numpy arrays. Page ids are digests, so their bits serve as hashes: a page lies in one of two buckets of eight
slots, the emptier one when it came. All operations take many pages at once, in a fixed number of array operations; removing a page leaves
no mark. Few different sets of replicas occur, so each is stored once and a slot holds its number."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]

WAYS = 8  # slots of a bucket: their ids are one cache line
MAX_LOAD = 0.8  # share of filled slots above which the table doubles; few pages find both buckets full below it
CHUNK = 1 << 14  # pages that are changed at once: their temporary arrays stay in a core's cache
GROW_CHUNK = 1 << 12  # buckets that are moved at once
EMPTY = 0  # number of the empty set of replicas; as a page id: a free slot

# Eight flags of a bucket are one word, whose lowest byte is that of the first slot. If one flag is set, TO_PLACE moves
# its place into the highest byte; COUNT moves the number of set flags there.
ALL_SET = np.uint64(0x0101010101010101)
TO_PLACE = np.uint64(0x0001020304050607)
COUNT = np.uint64(0x0101010101010101)
TOP = np.uint64(56)


@lru_cache(4096)
def replicas_in(mask: int) -> tuple[int, ...]:
    """Numbers of the bits that are set, ascending. Few masks occur, so what was found is remembered."""
    return tuple(at for at in range(mask.bit_length()) if mask >> at & 1)


def _distinct(pages: Pages) -> Pages:
    """The different ones among them. Sorting is many times as fast as np.unique(), which hashes."""
    ordered = np.sort(pages)
    is_same = ordered[1:] == ordered[:-1]
    return ordered[np.append(True, ~is_same)] if is_same.any() else ordered


def _slot_numbers(buckets: Pages, flags: Pages) -> Slots:
    """The slot of each bucket whose flag is set, one in each."""
    return (buckets * np.uint64(WAYS) + (flags * TO_PLACE >> TOP)).view(np.int64)


def _slots(pages: Pages, buckets: Pages, rows: Pages) -> Slots:
    """The slot of each page among the rows of its buckets; −1: it is in neither."""
    hits = (rows == pages[:, None, None]).view(np.uint64)[..., 0]
    first, second = hits[:, 0], hits[:, 1]
    found = first | second  # if both buckets are the same, both hits are
    slots = _slot_numbers(np.where(first, buckets[:, 0], buckets[:, 1]), found)
    slots[found == 0] = -1
    return slots


class ReplicaSets:
    """Sets of replicas as bit masks, each with a number."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._numbers: dict[int, int] = {0: EMPTY}

    def __len__(self) -> int:
        return len(self.masks)

    def number_of(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            number = self._numbers[mask] = len(self.masks)
            self.masks.append(mask)
        return number


class PageTable:
    def __init__(self, num_pages: int = 0, max_unused_sets: int = 4096) -> None:
        """`num_pages`: make room for so many at once. `max_unused_sets`: when so many more sets are stored than were in use at the last
        count, they are counted again and unused ones are dropped."""
        num_buckets = 16
        while num_buckets * WAYS * MAX_LOAD < num_pages:
            num_buckets *= 2
        self._allocate(num_buckets)
        self._sets = ReplicaSets()
        self._max_unused_sets = max_unused_sets
        self._max_sets = max_unused_sets
        self._num_slots_used = 0
        self._stash: dict[int, int] = {}  # pages whose buckets are both full → mask

    def _allocate(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._ids = np.zeros((num_buckets, WAYS), np.uint64)
        self._set_numbers = np.zeros(num_buckets * WAYS + 1, np.uint32)  # the last is for slot −1: always the empty set
        self._mask = np.uint64(num_buckets - 1)

    def __len__(self) -> int:
        return self._num_slots_used + len(self._stash)

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._set_numbers.nbytes

    # ── reading ──

    def masks_of(self, pages: Pages) -> list[int]:
        """The set of replicas that hold each page, as a bit mask."""
        masks = self._sets.masks
        numbers: list[int] = self._set_numbers[self._find(pages)].tolist()
        found = [masks[number] for number in numbers]
        if self._stash:
            stash = self._stash
            found = [mask or stash.get(page, 0) for mask, page in zip(found, pages.tolist(), strict=True)]
        return found

    def pages_of(self, replica: int) -> Pages:
        """All pages that the replica holds, in no particular order. Walks the table."""
        bit = 1 << replica
        holds = np.array([bool(mask & bit) for mask in self._sets.masks])
        in_table = self._ids.reshape(-1)[holds[self._set_numbers[:-1]]]
        in_stash = [page for page, mask in self._stash.items() if mask & bit]
        return np.concatenate([in_table, np.array(in_stash, np.uint64)])

    # ── writing ──

    def add(self, pages: Pages, replica: int) -> int:
        """The replica holds these pages. Returns how many of them it did not hold before."""
        return sum(self._add(pages[at : at + CHUNK], replica) for at in range(0, len(pages), CHUNK))

    def remove(self, pages: Pages, replica: int) -> int:
        """The replica no longer holds these pages. Returns how many of them it held."""
        return sum(self._remove(pages[at : at + CHUNK], replica) for at in range(0, len(pages), CHUNK))

    def remove_all(self, replica: int) -> None:
        """The replica holds nothing. Walks the table."""
        keep = ~(1 << replica)
        number_of = self._sets.number_of
        changed = np.array([number_of(mask & keep) for mask in list(self._sets.masks)], np.uint32)
        ids = self._ids.reshape(-1)
        for at in range(0, len(ids), 1 << 20):
            part = slice(at, min(at + (1 << 20), len(ids)))
            numbers = changed[self._set_numbers[part]]
            is_gone = (numbers == EMPTY) & (ids[part] != 0)
            self._set_numbers[part] = numbers
            ids[part][is_gone] = 0
            self._num_slots_used -= int(is_gone.sum())
        kept = {page: mask & keep for page, mask in self._stash.items()}
        self._stash = {page: mask for page, mask in kept.items() if mask}
        self._drop_unused_sets()

    def _add(self, pages: Pages, replica: int) -> int:
        if (len(self) + len(pages)) > MAX_LOAD * self._num_buckets * WAYS:
            self._make_room(len(pages))
        pages = _distinct(pages)
        buckets, rows = self._rows(pages)
        slots = _slots(pages, buckets, rows)
        is_new = slots < 0
        num_added, bit = 0, 1 << replica
        if self._stash and is_new.any():
            is_stashed = np.isin(pages, np.fromiter(self._stash, np.uint64))  # no page is in the table and in the stash
            for page in pages[is_stashed].tolist():
                num_added += not self._stash[page] & bit
                self._stash[page] |= bit
            is_new &= ~is_stashed
        if is_new.all():
            placed, left = self._insert(pages, buckets, rows)
        else:
            num_added += self._change(slots[slots >= 0], bit, True)
            placed, left = self._insert(pages[is_new], buckets[is_new], rows[is_new])
        self._set_numbers[placed] = self._sets.number_of(bit)
        self._stash.update(dict.fromkeys(left.tolist(), bit))
        num_added += len(placed) + len(left)
        self._drop_unused_sets()
        return num_added

    def _remove(self, pages: Pages, replica: int) -> int:
        pages = _distinct(pages)
        slots = self._find(pages)
        num_removed, bit = 0, 1 << replica
        if self._stash:
            for page in pages[slots < 0].tolist():
                mask = self._stash.get(page, 0)
                if mask & bit:
                    num_removed += 1
                    if mask == bit:
                        del self._stash[page]
                    else:
                        self._stash[page] = mask ^ bit
        slots = slots[slots >= 0]
        num_removed += self._change(slots, bit, False)
        is_gone = self._set_numbers[slots] == EMPTY
        self._ids.reshape(-1)[slots[is_gone]] = 0
        self._num_slots_used -= int(is_gone.sum())
        self._drop_unused_sets()
        return num_removed

    def _change(self, slots: Slots, bit: int, is_held: bool) -> int:
        """Set or clear a replica's bit. Returns how many of the slots' sets changed."""
        if not len(slots):
            return 0
        befores, inverse, counts = np.unique(self._set_numbers[slots], return_inverse=True, return_counts=True)
        afters = []
        for before in befores.tolist():
            mask = self._sets.masks[before]
            afters.append(self._sets.number_of(mask | bit if is_held else mask & ~bit))
        changed = np.array(afters, np.uint32)
        self._set_numbers[slots] = changed[inverse]
        return int(counts[changed != befores].sum())

    # ── slots ──

    def _rows(self, pages: Pages) -> tuple[Pages, Pages]:
        """The two buckets of each page, [pages, 2], and what is in them, [pages, 2, slots]."""
        buckets = np.empty((len(pages), 2), np.uint64)
        np.bitwise_and(pages, self._mask, out=buckets[:, 0])
        np.bitwise_and(pages >> np.uint64(32), self._mask, out=buckets[:, 1])
        return buckets, self._ids.take(
            buckets.view(np.int64), axis=0, mode="wrap"
        )  # several times as fast as self._ids[buckets]

    def _find(self, pages: Pages) -> Slots:
        """The slot of each page; −1: it has none."""
        return _slots(pages, *self._rows(pages))

    def _insert(self, pages: Pages, buckets: Pages, rows: Pages) -> tuple[Slots, Pages]:
        """Give each page a free slot, in the emptier of its buckets. The pages must be different, and not be in the table; `buckets` and
        `rows` are theirs. Returns their slots, in no particular order, and the pages that found none."""
        ids = self._ids.reshape(-1)
        placed: list[Slots] = []
        left: list[Pages] = []
        while len(pages):
            used = (rows != 0).view(np.uint64)[..., 0]
            counts = used * COUNT >> TOP
            is_second = counts[:, 1] < counts[:, 0]
            free = np.where(is_second, used[:, 1], used[:, 0]) ^ ALL_SET
            bucket = np.where(is_second, buckets[:, 1], buckets[:, 0])
            if not free.all():
                fits = free != 0
                left.append(pages[~fits])
                pages, bucket, free = pages[fits], bucket[fits], free[fits]
            slots = _slot_numbers(bucket, free & (~free + np.uint64(1)))
            # Pages that want one slot write to it one after another: the last has it, the others try again.
            ids[slots] = pages
            has_it = ids[slots] == pages
            placed.append(slots[has_it])
            pages = pages[~has_it]
            if len(pages):
                buckets, rows = self._rows(pages)
        all_placed = np.concatenate(placed) if placed else np.zeros(0, np.int64)
        self._num_slots_used += len(all_placed)
        return all_placed, np.concatenate(left) if left else np.zeros(0, np.uint64)

    def _make_room(self, num_pages: int) -> None:
        """Double the table until so many more pages fit. A bucket's pages go to two buckets, by one more bit of their ids. The arrays are made
        longer where they are: at no time is the table in memory twice."""
        while (len(self) + num_pages) > MAX_LOAD * self._num_buckets * WAYS:
            size = self._num_buckets
            self._num_buckets, self._mask = 2 * size, np.uint64(2 * size - 1)
            self._ids.resize((2 * size, WAYS), refcheck=False)  # what is new is zero; no view outlives a method
            self._set_numbers.resize(2 * size * WAYS + 1, refcheck=False)
            numbers = self._set_numbers[:-1].reshape(-1, WAYS)
            for at in range(0, size, GROW_CHUNK):
                part = slice(at, min(at + GROW_CHUNK, size))
                upper = slice(part.start + size, part.stop + size)
                ids, here = self._ids[part], np.arange(part.start, part.stop, dtype=np.uint64)[:, None]
                is_first = (ids & np.uint64(size - 1)) == here  # else the page is in its second bucket
                goes_up = np.where(is_first, ids, ids >> np.uint64(32)) & np.uint64(size) != 0
                for array in (self._ids, numbers):
                    np.multiply(array[part], goes_up, out=array[upper])
                    array[part] ^= array[upper]
            stash, self._stash = self._stash, {}
            for page, mask in stash.items():
                pages = np.array([page], np.uint64)
                placed, left = self._insert(pages, *self._rows(pages))
                self._set_numbers[placed] = self._sets.number_of(mask)
                if len(left):
                    self._stash[page] = mask

    def _drop_unused_sets(self) -> None:
        if len(self._sets) <= self._max_sets:
            return
        is_used = np.zeros(len(self._sets), bool)
        is_used[self._set_numbers] = True
        is_used[EMPTY] = True
        before, self._sets = self._sets, ReplicaSets()
        used: list[int] = np.flatnonzero(is_used).tolist()
        changed = np.zeros(len(before), np.uint32)
        for number in used:
            changed[number] = self._sets.number_of(before.masks[number])
        for at in range(0, len(self._set_numbers), 1 << 20):
            self._set_numbers[at : at + (1 << 20)] = changed[self._set_numbers[at : at + (1 << 20)]]
        self._max_sets = len(self._sets) + self._max_unused_sets
