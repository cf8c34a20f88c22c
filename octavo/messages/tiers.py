"""What a page mover tells the engine: events that its threads put into a queue."""

import msgspec


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A load is over."""

    ticket: int
    count: int  # pages that are right, from the first on
    dropped: list[bytes]  # keys that were found to be gone
    seconds: float


class Copied(msgspec.Struct, frozen=True, gc=False):
    """The pages of a store were copied; it waits for approval."""


class TierKnown(msgspec.Struct, frozen=True, gc=False):
    """Pages that the tier has now, and pages that it has no more. A store ends with one."""

    stored: list[bytes]
    dropped: list[bytes]
    num_bytes: int  # in the tier
    seconds: float = 0.0  # that the store took
    ends_store: bool = False


class TierFailed(msgspec.Struct, frozen=True, gc=False):
    """A store has failed."""

    keys: list[bytes]
    pause: float  # seconds for which nothing is to be stored


TierEvent = Loaded | Copied | TierKnown | TierFailed
