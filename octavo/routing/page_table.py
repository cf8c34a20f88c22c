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
CHUNK = 1 << 16  # pages that are inserted at once: bounds the temporary arrays
EMPTY = 0  # number of the empty set of replicas; as a page id: a free slot


@lru_cache(4096)
def replicas_in(mask: int) -> tuple[int, ...]:
    """Numbers of the bits that are set, ascending. Few masks occur, so what was found is remembered."""
    return tuple(at for at in range(mask.bit_length()) if mask >> at & 1)


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
        pages = np.unique(pages)
        slots = self._find(pages)
        is_new = slots < 0
        num_added, bit = 0, 1 << replica
        if self._stash and is_new.any():
            for at in np.flatnonzero(is_new).tolist():
                page = int(pages[at])
                if page in self._stash:
                    num_added += not self._stash[page] & bit
                    self._stash[page] |= bit
                    is_new[at] = False
        new = pages[is_new]
        if len(new):
            placed, left = self._insert(new)
            self._set_numbers[placed] = self._sets.number_of(bit)
            self._stash.update(dict.fromkeys(left.tolist(), bit))
            num_added += len(new)
        num_added += self._change(slots[slots >= 0], bit, True)
        self._drop_unused_sets()
        return num_added

    def _remove(self, pages: Pages, replica: int) -> int:
        pages = np.unique(pages)
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

    def _find(self, pages: Pages) -> Slots:
        """The slot of each page; −1: it has none."""
        first, second = pages & self._mask, (pages >> np.uint64(32)) & self._mask
        wanted = pages[:, None]
        hits = np.concatenate([self._ids[first] == wanted, self._ids[second] == wanted], axis=1)
        at = hits.argmax(axis=1)  # 0 if there is no hit
        buckets = np.where(at < WAYS, first, second).view(np.int64)
        return np.where(hits[np.arange(len(pages)), at], buckets * WAYS + at % WAYS, -1)

    def _insert(self, pages: Pages) -> tuple[Slots, Pages]:
        """Give each page a free slot, in the emptier of its buckets. The pages must be different, and not be in the table. Returns their
        slots, in no particular order, and the pages that found none."""
        ids = self._ids.reshape(-1)
        placed: list[Slots] = []
        left: list[Pages] = []
        while len(pages):
            first, second = pages & self._mask, (pages >> np.uint64(32)) & self._mask
            num_first = np.count_nonzero(self._ids[first], axis=1)
            num_second = np.count_nonzero(self._ids[second], axis=1)
            buckets = np.where(num_second < num_first, second, first)
            is_free = self._ids[buckets] == 0
            fits = is_free.any(axis=1)
            if not fits.all():
                left.append(pages[~fits])
                pages, buckets, is_free = pages[fits], buckets[fits], is_free[fits]
            slots = (buckets * np.uint64(WAYS)).astype(np.int64) + is_free.argmax(axis=1)
            ids[slots] = (
                pages  # pages that want one slot write to it one after another: the last has it, the others try again
            )
            has_it = ids[slots] == pages
            placed.append(slots[has_it])
            pages = pages[~has_it]
        all_placed = np.concatenate(placed) if placed else np.zeros(0, np.int64)
        self._num_slots_used += len(all_placed)
        return all_placed, np.concatenate(left) if left else np.zeros(0, np.uint64)

    def _make_room(self, num_pages: int) -> None:
        """Double the table until so many more pages fit. A bucket's pages go to two buckets, by one more bit of their ids."""
        while (len(self) + num_pages) > MAX_LOAD * self._num_buckets * WAYS:
            old_ids, old_numbers, size = self._ids, self._set_numbers[:-1].reshape(-1, WAYS), self._num_buckets
            self._allocate(2 * size)
            numbers = self._set_numbers[:-1].reshape(-1, WAYS)
            for at in range(0, size, CHUNK):
                ids, part = old_ids[at : at + CHUNK], slice(at, min(at + CHUNK, size))
                upper = slice(part.start + size, part.stop + size)
                here = np.arange(part.start, part.stop, dtype=np.uint64)[:, None]
                is_first = (ids & np.uint64(size - 1)) == here  # else the page is in its second bucket
                goes_up = np.where(is_first, ids, ids >> np.uint64(32)) & np.uint64(size) != 0
                self._ids[part], numbers[part] = np.where(goes_up, 0, ids), np.where(goes_up, 0, old_numbers[part])
                self._ids[upper], numbers[upper] = np.where(goes_up, ids, 0), np.where(goes_up, old_numbers[part], 0)
            stash, self._stash = self._stash, {}
            for page, mask in stash.items():
                placed, left = self._insert(np.array([page], np.uint64))
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
