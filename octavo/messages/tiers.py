"""What a page mover tells the engine: events that its threads put into a queue."""

from typing import Literal, NamedTuple

import msgspec

Level = Literal["ram", "disk"]
"""Of a tier: pinned memory of the host, or files."""


IN_RAM = -1
"""In place of a page's number: it is in the level `ram`, and no longer in the KV store."""


class TierCounts(NamedTuple):
    """What a tier holds, and what became of its files since the start."""

    disk_bytes: int = 0  # of the whole folder
    num_bad: int = 0  # files that were torn, foreign or damaged
    num_evicted: int = 0  # files that made room for others
    ram_bytes: int = 0


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A load is over."""

    ticket: int
    count: int  # pages that are right, from the first on
    dropped: list[bytes]  # keys that were found to be gone
    seconds: float
    num_from_ram: int = 0  # of the pages …
    ram_seconds: float = 0.0  # … and of the time


class Copied(msgspec.Struct, frozen=True, gc=False):
    """The pages of a store were copied; it waits for approval."""


class TierKnown(msgspec.Struct, frozen=True, gc=False):
    """Pages that a level of the tier has now, and pages that it has no more. A store ends with one."""

    stored: list[bytes]
    dropped: list[bytes]
    seconds: float = 0.0  # that the store took
    ends_store: bool = False
    level: Level = "disk"


class TierFailed(msgspec.Struct, frozen=True, gc=False):
    """A store has failed."""

    keys: list[bytes]
    pause: float  # seconds for which nothing is to be stored


TierEvent = Loaded | Copied | TierKnown | TierFailed
