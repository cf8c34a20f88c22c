"""Messages about prefixes that clients pin (POST /v1/prefix)."""

import msgspec


class HoldPrefix(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Evict the pages of this prompt last. The reply is a PrefixReply as JSON."""

    call: int
    name: str
    prompt_ids: list[int]
    owner: bytes = b""  # of the API key
    seconds: float = 0.0  # for how long; 0: until it is released
    max_bytes: int = -1  # of all that this owner pins; −1: an eighth of the KV store
    space: str = ""  # SamplingParams.prefix_space
    origin: int = 0


class ReleasePrefix(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Undo a HoldPrefix. The reply is a PrefixReply as JSON."""

    call: int
    name: str
    owner: bytes = b""
    origin: int = 0


class ReadPrefixes(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Ask for a PrefixReply as JSON: what is pinned."""

    call: int
    owner: bytes | None = None  # only of this owner; None: of all
    origin: int = 0


class PinnedPrefix(msgspec.Struct, frozen=True, gc=False):
    name: str
    tokens: int  # of its full pages
    cached_tokens: int  # of these, from the first on: in the prefix cache now
    bytes: int
    seconds_left: float | None  # None: until it is unpinned


class PrefixReply(msgspec.Struct, frozen=True, gc=False):
    pinned: list[PinnedPrefix] = []
    error: str = ""
    owners: list[bytes] = []  # of `pinned`, in this order: two keys may use the same name
