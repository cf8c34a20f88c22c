"""What a replica sends to routers beside its tokens: which pages its prefix cache holds, and how much work waits there.

Pages travel as the first eight bytes of their keys. That is enough to tell them apart; where two keys ever agree in these, a router
expects a page that is not there, and the replica computes it."""

import msgspec

PAGE_ID_BYTES = 8


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The work of a replica, as of one moment."""

    uncached_tokens: int = 0  # tokens of open requests that are to be computed before each samples its next one
    seconds_per_token: float = 0.0  # measured, in full steps; 0: not measured yet
    num_open: int = 0  # requests
    num_taken: dict[int, int] = {}  # number of an API process → requests that came from it in this epoch


class PageEvents(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Changes to a replica's prefix cache since the event before. No page is in both lists."""

    replica: int
    epoch: int  # of the replica: raised whenever it is started again or was taken for dead
    number: int  # 1, 2, 3 …: a gap means that events were lost, and a snapshot is needed
    stored: bytes  # page ids, one after the other
    evicted: bytes
    load: ReplicaLoad


class PageSnapshot(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All pages of a replica's prefix cache, after the event with this number."""

    replica: int
    epoch: int
    number: int
    pages: bytes
    load: ReplicaLoad
