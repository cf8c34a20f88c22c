"""PrefixIndex: which replica holds how much of a prompt, from the events that replicas send."""

from collections.abc import Sequence

import numpy as np

from octavo.messages import PageEvents, PageSnapshot
from octavo.routing.page_table import Pages, PageTable, replicas_in

FIRST_LOOK = 64
"""Pages of a prompt that are looked up at first: most prompts that no replica knows differ there, and a longer look is in vain."""


def page_ids(data: bytes | Sequence[bytes]) -> Pages:
    """Page ids from the bytes of an event, or from the keys of pages. 0 means a free slot in the table, so it becomes 1."""
    joined = data if isinstance(data, bytes) else b"".join([key[:8] for key in data])
    ids = np.frombuffer(joined, "<u8").astype(np.uint64)
    ids[ids == 0] = 1
    return ids


class _Followed:
    """How far a replica's events have been followed."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0  # of the last event
        self.is_complete = True  # no event is missing
        self.num_pages = 0


class PrefixIndex:
    """Events of a replica are followed from open() to close(), in one epoch; others are dropped. Where events were lost, the index goes
    on with what it has, and wants a snapshot."""

    def __init__(self, num_pages: int = 0) -> None:
        """`num_pages`: make room for so many at once."""
        self._table = PageTable(num_pages)
        self._followed: dict[int, _Followed] = {}
        self._expected: dict[int, int] = {}  # page → mask of the replicas that are about to have it
        self._expected_by: dict[
            str, tuple[int, list[int]]
        ] = {}  # request → its replica, and the pages that are expected for it

    def __len__(self) -> int:
        """Number of different pages."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    # ── replicas ──

    def open(self, replica: int, epoch: int) -> None:
        """Follow a replica whose prefix cache is empty, or known from a snapshot to come."""
        self.close(replica)
        self._followed[replica] = _Followed(epoch)

    def close(self, replica: int) -> None:
        """Forget a replica and all of its pages."""
        followed = self._followed.pop(replica, None)
        if followed is not None and followed.num_pages:
            self._table.remove_all(replica)
        for request_id in [each for each, (its_replica, _) in self._expected_by.items() if its_replica == replica]:
            self.settle(request_id)

    def num_pages(self, replica: int) -> int:
        return self._followed[replica].num_pages

    @property
    def incomplete(self) -> list[int]:
        """Replicas that are to send a snapshot."""
        return [replica for replica, followed in self._followed.items() if not followed.is_complete]

    # ── events ──

    def apply(self, events: PageEvents) -> bool:
        """False: the events are of another epoch or were applied before, and change nothing."""
        followed = self._followed.get(events.replica)
        if followed is None or followed.epoch != events.epoch or events.number <= followed.number:
            return False
        if events.number != followed.number + 1:
            followed.is_complete = False
        followed.number = events.number
        if events.evicted:
            followed.num_pages -= self._table.remove(page_ids(events.evicted), events.replica)
        if events.stored:
            followed.num_pages += self._table.add(page_ids(events.stored), events.replica)
        return True

    def apply_snapshot(self, snapshot: PageSnapshot) -> bool:
        """False: the snapshot is of another epoch or older than the last event, and changes nothing."""
        followed = self._followed.get(snapshot.replica)
        if followed is None or followed.epoch != snapshot.epoch or snapshot.number < followed.number:
            return False
        followed.number, followed.is_complete = snapshot.number, True
        pages = page_ids(snapshot.pages)
        if followed.num_pages:
            gone = np.setdiff1d(self._table.pages_of(snapshot.replica), pages)
            followed.num_pages -= self._table.remove(gone, snapshot.replica)
        followed.num_pages += self._table.add(pages, snapshot.replica)
        return True

    # ── prompts ──

    def held(self, pages: Pages) -> dict[int, int]:
        """How many pages of a prompt each replica holds or is about to hold, from the first on. Replicas that lack the first are left out."""
        found: dict[int, int] = {}
        mask, start = -1, 0
        while mask and start < len(pages):
            end = len(pages) if start else FIRST_LOOK
            part = pages[start:end]
            masks = self._table.masks_of(part)
            if self._expected:
                expected = self._expected
                masks = [each | expected.get(page, 0) for each, page in zip(masks, part.tolist(), strict=True)]
            for at, holders in enumerate(masks, start):
                if mask & holders != mask:
                    if at:
                        found.update(dict.fromkeys(replicas_in(mask & ~holders), at))
                    mask &= holders
                    if not mask:
                        break
            start = end
        if mask > 0:
            found.update(dict.fromkeys(replicas_in(mask), len(pages)))
        return found

    def expect(self, request_id: str, pages: Pages, replica: int, num_held: int) -> None:
        """A request was sent to the replica, which will compute the pages from `num_held` on. Until settle(), they count as held, so that
        requests with the same prefix that come at the same time are not computed in several places."""
        bit, new = 1 << replica, []
        for page in pages[num_held:].tolist():
            mask = self._expected.get(page, 0)
            if not mask & bit:
                self._expected[page] = mask | bit
                new.append(page)
        self._expected_by[request_id] = (replica, new)

    def settle(self, request_id: str) -> None:
        """The request's prompt is computed, or the request is gone: from now on, only what the replica has reported counts."""
        replica, pages = self._expected_by.pop(request_id, (0, []))
        for page in pages:
            mask = self._expected[page] & ~(1 << replica)
            if mask:
                self._expected[page] = mask
            else:
                del self._expected[page]

    @property
    def num_expected(self) -> int:
        return len(self._expected)
