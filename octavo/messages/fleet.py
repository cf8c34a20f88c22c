"""What a replica sends to routers beside its tokens: which pages its prefix cache holds, and how much work waits there.

Pages travel as the first eight bytes of their keys. That is enough to tell them apart; where two keys ever agree in these, a router
expects a page that is not there, and the replica computes it."""

from typing import Literal

import msgspec

PAGE_ID_BYTES = 8


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The work of a replica, as of one moment."""

    uncached_tokens: int = 0  # tokens of open requests that are to be computed before each samples its next one
    seconds_per_token: float = 0.0  # measured, in full steps; 0: not measured yet
    num_open: int = 0  # requests
    num_taken: dict[int, int] = {}  # number of an API process → requests that came from it in this epoch

    @property
    def seconds(self) -> float:
        """Of work that waits. 0 while nothing was measured."""
        return self.uncached_tokens * self.seconds_per_token


class PageEvents(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Changes to a replica's prefix cache since the event before. No page is in both lists."""

    replica: int
    epoch: int  # of the replica: raised whenever it is started again or was taken for dead
    number: int  # 1, 2, 3 …: a gap means that events were lost, and a snapshot is needed
    stored: bytes  # page ids, one after the other
    evicted: bytes
    load: ReplicaLoad
    adapters: dict[str, str] = {}  # AdapterRef.key → id of its content, which page keys start from: those that are new


class PageSnapshot(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All pages of a replica's prefix cache, after the event with this number."""

    replica: int
    epoch: int
    number: int
    pages: bytes
    load: ReplicaLoad
    adapters: dict[str, str] = {}  # all


# ── the fleet as its supervisor sees it ─────────────────────────────────────────────────────────────

ReplicaStatus = Literal["starting", "ready", "draining", "restarting", "failed"]
"""starting: for the first time; restarting: its engine has ended or was stopped, and another one starts; failed: it is not started
again."""


class ReplicaState(msgspec.Struct, frozen=True, gc=False):
    """One replica."""

    replica: int
    status: ReplicaStatus
    epoch: int  # of its current engine
    restarts: int = 0
    place: str = ""  # where it runs and on what: cores, GPUs, a node
    pid: int = 0  # of its engine's process; 0: it has none


class FleetState(msgspec.Struct, frozen=True, gc=False):
    """All replicas, and how many there should be."""

    replicas: list[ReplicaState]
    target: int
    note: str = ""  # what is being done: a rolling restart, or why there are fewer
