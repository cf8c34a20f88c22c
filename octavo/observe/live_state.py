"""LiveState: the engine at one moment, and LiveHistory, what it did before, as the cockpit and `octavo top` show them."""

from array import array

import msgspec

BLOCK = 64
"""Pages that are compared at once: most of a large map does not change between two looks."""


class LiveRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A row of the batch."""

    row: int
    request: str  # the HTTP request's id
    choice: int
    is_prompt: bool  # it computes a part of its prompt
    step_tokens: int  # in the last step; 0: the step had no room for it
    length: int  # tokens so far
    prompt_len: int
    max_len: int
    pages: int
    owner: int  # its code in the page map


class LiveWait(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request in the queue."""

    request: str
    reason: str
    seconds: float
    prompt_len: int
    is_preempted: bool
    host_pages: int  # that it was swapped to


class LiveEnd(msgspec.Struct, frozen=True, gc=False):
    """A request that is over."""

    number: int  # counts up
    id: str
    status: int
    seconds: float
    stages: dict[str, float]
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    at: float = 0.0  # when, CLOCK_MONOTONIC as `time` of the state
    cached_tokens: int = 0  # ┐ as in Responded
    cache_miss: str = ""  # │
    differs_at: int | None = None  # ┘


class LiveLane(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A part of the queue."""

    name: str
    count: int
    oldest_seconds: float


class LivePast(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One interval of the history: what happened in it, by the names of LiveTotals, and the largest values of gauges."""

    time: float  # when it began
    steps: float
    prompt_tokens: float
    cached_tokens: float
    generation_tokens: float
    finished: float
    preemptions: float
    busy_seconds: float
    first_tokens: float
    first_token_seconds: float
    token_gaps: float
    token_gap_seconds: float
    starts: float  # of engines
    used_share: float  # of the pages
    num_waiting: float
    num_rows: float


class LiveHistory(msgspec.Struct, frozen=True, gc=False):
    time: float
    interval: int  # seconds
    since: float  # when the first engine of this server was there
    points: list[LivePast]  # oldest first; an interval in which nothing happened has none


class LiveTotals(msgspec.Struct, frozen=True, gc=False):
    """Counts since the start; a rate is the difference of two."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    finished: int
    preemptions: int
    busy_seconds: float
    first_tokens: int  # ┐ how many times to first token, and their sum
    first_token_seconds: float  # ┘
    token_gaps: int
    token_gap_seconds: float


class LiveReplica(msgspec.Struct, frozen=True, gc=False):
    """One replica of a fleet. Its rows and pages are a part of the state's lists, from the first ones named here on."""

    replica: int
    status: str  # octavo.messages.ReplicaStatus; in all states but ready and draining, the figures below are 0
    epoch: int = 0  # counts the fleet's engines
    restarts: int = 0
    place: str = ""
    first_row: int = 0
    max_rows: int = 0
    num_rows: int = 0
    num_waiting: int = 0
    first_page: int = 0
    num_pages: int = 0
    num_cached_pages: int = 0
    num_free_pages: int = 0
    waiting_seconds: float = 0.0  # of work, as the router counts it
    totals: LiveTotals | None = None  # None: it does not answer


class LiveState(msgspec.Struct, frozen=True, gc=False):
    time: float
    step: int
    totals: LiveTotals
    num_waiting: int
    rows: list[LiveRow]
    waiting: list[LiveWait]  # the first of them
    lanes: list[LiveLane]  # all of them
    blocked_by: str | None  # what the queue's head lacks
    advice: str  # in words; empty: no request waits
    num_pages: int
    page_size: int
    max_rows: int
    max_step_tokens: int
    num_host_pages: int
    num_host_pages_used: int
    num_shared_pages: int
    num_cached_pages: int
    num_free_pages: int
    ended: list[LiveEnd]  # since the last look
    recent: list[LivePast]  # the last seconds of the history
    # A 16-bit code for each page, little endian (cache/page_map.py): 0 free, 1 cached, 2 shared, 65534 being filled from a tier, 65535 cached and
    # held for a conversation or a pin, else an owner's.
    pages: bytes
    replicas: list[LiveReplica] = []  # of a fleet; empty: there is one engine
    num_held_pages: int = 0  # of the cached ones: those of conversations that may go on, and of pinned prefixes
    num_loading_pages: int = 0
    num_tier_pages: int = 0  # pages of this model in the folder of --kv-tier …
    tier_bytes: int = 0  # … and the bytes of its folder
    num_ram_pages: int = 0  # pages in the host's memory (--kv-tier ram) …
    ram_tier_bytes: int = 0  # … and their bytes


class LiveLook(msgspec.Struct, frozen=True, gc=False):
    """What the engine sends its API processes: the state, and the owner of each request in its lists."""

    state: LiveState
    rows: list[bytes]
    waiting: list[bytes]
    ended: list[bytes]

    def seen_by(self, owner: bytes | None) -> LiveState:
        """The state without the single requests of other owners. Counts, totals and the page map stay. None: all of it."""
        if owner is None:
            return self.state
        state = self.state
        return msgspec.structs.replace(
            state,
            rows=[row for row, whose in zip(state.rows, self.rows, strict=True) if whose == owner],
            waiting=[wait for wait, whose in zip(state.waiting, self.waiting, strict=True) if whose == owner],
            ended=[end for end, whose in zip(state.ended, self.ended, strict=True) if whose == owner],
        )


def changes(before: bytes, after: bytes) -> list[tuple[int, list[int]]]:
    """Where two page maps of one size differ: (first page, codes from there on). Equal parts are skipped quickly."""
    assert len(before) == len(after)
    found: list[tuple[int, list[int]]] = []
    if before == after:
        return found
    old, new = array("H", before), array("H", after)
    size = 2 * BLOCK
    for block in range(0, len(after), size):
        if before[block : block + size] == after[block : block + size]:
            continue
        for page in range(block // 2, min(block // 2 + BLOCK, len(new))):
            if old[page] == new[page]:
                continue
            if found and found[-1][0] + len(found[-1][1]) == page:
                found[-1][1].append(new[page])
            else:
                found.append((page, [new[page]]))
    return found
