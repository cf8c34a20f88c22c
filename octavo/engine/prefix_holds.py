"""PrefixHolds: prefixes whose pages are evicted last: those of conversations for a time after their last turn, and those that a client has pinned.

It runs on the stepping thread. A hold is a wish: where running requests need the pages, they get them. What is held changes between two steps, as an input
of the cache that is recorded, because it steers which pages are taken (decision 057); the clock stays here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from octavo.cache import KVCache
from octavo.cache.page_keys import adapter_root, keys_of
from octavo.messages import Abort, GenerateRequest
from octavo.messages.prefixes import HoldPrefix, PinnedPrefix, PrefixReply, ReleasePrefix
from octavo.observe.metrics.gauges import HoldState
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, Removed

HELD_SHARE = 0.5  # of all pages: most that are held
MAX_SESSIONS = 4096
MAX_PINS = 64  # of one API key

Name = tuple[
    bytes, str, bytes
]  # owner, session or pin, and, of a conversation without a name, the key of its last page


@dataclass(slots=True)
class _Hold:
    keys: list[bytes]
    num_tokens: int
    until: float


class PrefixHolds(StepObserver):
    is_essential = True  # the loop asks it in every step

    def __init__(self, cache: KVCache, observers: Observers, page_bytes: int, clock: Callable[[], float]) -> None:
        self._cache, self._observers, self._page_bytes, self._clock = cache, observers, page_bytes, clock
        self.max_pages = int(HELD_SHARE * cache.pool.num_pages)
        self._sessions: dict[Name, _Hold] = {}
        self._pins: dict[Name, _Hold] = {}
        self._open: dict[str, GenerateRequest] = {}  # requests whose pages are to be held when they end
        self._ended: list[tuple[GenerateRequest, list[int]]] = []  # since the last step: with all tokens
        self._num_pages = 0  # of all holds; a page of two counts twice
        self._next = math.inf  # when the first hold ends
        self.num_dropped = 0  # holds of conversations that ended before their time, for others

    @property
    def is_due(self) -> bool:
        """Whether take() has something to do."""
        return bool(self._ended) or (self._next != math.inf and self._next <= self._clock())

    def state(self) -> HoldState:
        """For metrics."""
        pages = [sum(len(hold.keys) for hold in holds.values()) for holds in (self._sessions, self._pins)]
        return HoldState(
            {"session": len(self._sessions), "pin": len(self._pins)},
            {"session": pages[0] * self._page_bytes, "pin": pages[1] * self._page_bytes},
            self.num_dropped,
        )

    # ── conversations ──

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        if request.retain_seconds > 0 and self._cache.prefix_caching:
            self._open[request.id] = request

    def committed(self, committed: Committed, times: StepTimes) -> None:
        if self._open and committed.ended:
            self._note_ended(committed.ended)

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        if self._open:
            self._note_ended(removed.ended)

    def _note_ended(self, ended: list[Request]) -> None:
        """The first choice that ends counts: a conversation goes on with one of them, mostly the only one."""
        for request in ended:
            if (source := self._open.pop(request.id, None)) is not None:
                self._ended.append((source, request.tokens[: max(request.computed, 0)]))

    # ── pins ──

    def pin(self, wish: HoldPrefix) -> PrefixReply:
        """Hold a prompt's pages until `seconds` from now, or until they are released. Another pin of the same name is replaced."""
        self.take()
        if not self._cache.prefix_caching:
            return PrefixReply(error="the prefix cache is off (--no-enable-prefix-caching): nothing can be pinned")
        name: Name = (wish.owner, wish.name, b"")
        keys = keys_of(adapter_root(self._cache.root, wish.space), [*wish.prompt_ids, -1], self._cache.page_size)
        others = {each: len(hold.keys) for each, hold in self._pins.items() if each != name}
        mine = [count for (owner, _, _), count in others.items() if owner == wish.owner]
        most = wish.max_bytes // self._page_bytes if wish.max_bytes >= 0 else self._cache.pool.num_pages // 8
        if len(mine) >= MAX_PINS:
            return PrefixReply(error=f"this key has pinned {MAX_PINS} prefixes, the most there can be: unpin one")
        for room, whose in (
            (most - sum(mine), "this key may pin {} more (--max-pinned-bytes)"),
            (self.max_pages - sum(others.values()), "all keys together may pin {} more, of half of the KV store"),
        ):
            if len(keys) > room:
                left = whose.format(max(0, room) * self._page_bytes)
                return PrefixReply(error=f"the prefix takes {len(keys) * self._page_bytes} bytes of KV pages; {left}")
        until = self._clock() + wish.seconds if wish.seconds > 0 else math.inf
        self._put(self._pins, name, keys, until)
        return PrefixReply(self.pins(wish.owner))

    def unpin(self, wish: ReleasePrefix) -> PrefixReply:
        self.take()
        name: Name = (wish.owner, wish.name, b"")
        if name not in self._pins:
            return PrefixReply(self.pins(wish.owner), error=f"no prefix is pinned under the name {wish.name!r}")
        self._drop(self._pins, name)
        return PrefixReply(self.pins(wish.owner))

    def pins(self, owner: bytes | None) -> list[PinnedPrefix]:
        """Of one owner; None: of all."""
        now, index, size = self._clock(), self._cache.pool.index, self._cache.page_size
        return [
            PinnedPrefix(
                name,
                hold.num_tokens,
                next((at for at, key in enumerate(hold.keys) if key not in index), len(hold.keys)) * size,
                len(hold.keys) * self._page_bytes,
                None if hold.until == math.inf else round(max(0.0, hold.until - now), 1),
            )
            for (its_owner, name, _), hold in self._pins.items()
            if owner in (None, its_owner)
        ]

    # ── between two steps ──

    def take(self) -> None:
        """Hold what has ended since the last step, and let go of what is over."""
        now = self._clock()
        ended, self._ended = self._ended, []
        for source, tokens in ended:
            self._hold_session(source, tokens, now)
        if self._next <= now:
            for holds in (self._sessions, self._pins):
                for name in [name for name, hold in holds.items() if hold.until <= now]:
                    self._drop(holds, name)

    def _hold_session(self, source: GenerateRequest, tokens: list[int], now: float) -> None:
        root = adapter_root(self._cache.root, source.params.prefix_space)
        keys = keys_of(root, tokens, self._cache.page_size)
        if not keys or len(keys) > self.max_pages:
            return
        name: Name = (source.owner, source.session, b"")
        if not source.session:
            # A conversation without a name goes on where it ended: a hold whose last page is among these pages is its last turn's.
            nameless = ((source.owner, "", key) for key in reversed(keys))
            name = next((each for each in nameless if each in self._sessions), (source.owner, "", keys[-1]))
        old = self._sessions.get(name)
        self._put(self._sessions, name, keys, max(now + source.retain_seconds, 0.0 if old is None else old.until))
        if not source.session and name[2] != keys[-1]:
            self._sessions[source.owner, "", keys[-1]] = self._sessions.pop(name)

    def _put(self, holds: dict[Name, _Hold], name: Name, keys: list[bytes], until: float) -> None:
        old = holds.pop(name, None)
        before = [] if old is None else old.keys
        known, wanted = set(before), set(keys)
        self._change([key for key in keys if key not in known], [key for key in before[::-1] if key not in wanted])
        holds[name] = _Hold(keys, len(keys) * self._cache.page_size, until)
        self._next = min(self._next, until)
        while self._num_pages > self.max_pages or len(self._sessions) > MAX_SESSIONS:
            others = [each for each in self._sessions if each != name or holds is self._pins]
            if not others:
                break
            self._drop(self._sessions, min(others, key=lambda each: self._sessions[each].until))
            self.num_dropped += 1

    def _drop(self, holds: dict[Name, _Hold], name: Name) -> None:
        self._change([], holds.pop(name).keys[::-1])
        self._next = min(
            (hold.until for each in (self._sessions, self._pins) for hold in each.values()), default=math.inf
        )

    def _change(self, held: list[bytes], released: list[bytes]) -> None:
        if not held and not released:
            return
        self._cache.hold(held)
        self._cache.let_go(released)
        self._num_pages += len(held) - len(released)
        self._observers.prefixes_held(held, released)
