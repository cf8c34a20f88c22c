"""PrefixHolds: prefixes whose pages are evicted last: those of conversations for a time after their last turn, and those that a client has pinned.

It runs on the stepping thread. A hold is a wish: where running requests need the pages, they get them. What is held
changes between two steps, as an input of the cache that is recorded, because it steers which pages are taken (decision
057); the clock stays here.

Pins are saved in files. When an engine dies, the next one holds them again, and computes them again, or loads them from
a tier, behind the requests that it takes over (decision 061)."""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.cache import KVCache
from octavo.cache.page_keys import adapter_root, keys_of
from octavo.engine.pin_files import MAX_TRIES, PinFiles, SavedPin
from octavo.messages import Abort, GenerateRequest, SamplingParams
from octavo.messages.prefixes import HoldPrefix, PinnedPrefix, PrefixReply, ReleasePrefix
from octavo.observe.metrics.gauges import HoldState
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, Removed

log = logging.getLogger("octavo.engine")

HELD_SHARE = 0.5  # of all pages: most that are held
MAX_SESSIONS = 4096
MAX_PINS = 64  # of one API key

NO_ORIGIN = -1  # of requests that no API process has sent

Name = tuple[bytes, str, bytes]
"""The owner; the name of the session or pin; of a conversation without a name, the key of its last page."""


@dataclass(slots=True)
class _Hold:
    keys: list[bytes]
    num_tokens: int
    until: float


class PrefixHolds(StepObserver):
    """Observes steps from the first wish on. Until then no step has anything to do with it."""

    is_essential = True  # the loop asks it in every step

    def __init__(
        self,
        cache: KVCache,
        observers: Observers,
        page_bytes: int,
        clock: Callable[[], float],
        files: PinFiles | None = None,
    ) -> None:
        """`files`: where pins are saved; None: they end with this engine."""
        self._cache, self._observers, self._page_bytes, self._clock = cache, observers, page_bytes, clock
        self._files = files
        self.to_warm: deque[SavedPin] = deque()  # of an engine that died: their pages are not computed yet
        self._warming: SavedPin | None = None
        self.max_pages = int(HELD_SHARE * cache.pool.num_pages)
        self._sessions: dict[Name, _Hold] = {}
        self._pins: dict[Name, _Hold] = {}
        self._open: dict[str, GenerateRequest] = {}  # requests whose pages are to be held when they end
        self._ended: list[tuple[GenerateRequest, list[int]]] = []  # since the last step: with all tokens
        self._num_pages = 0  # of all holds; a page of two counts twice
        self._next = math.inf  # when the first hold ends
        self.is_used = False  # whether there was a wish
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

    def follow(self, request: GenerateRequest) -> None:
        """Hold the pages of this request, which is in the queue, when it has ended."""
        if self._cache.prefix_caching:
            self._open[request.id] = request
            self._begin()

    def _begin(self) -> None:
        if not self.is_used:
            self.is_used = True
            self._observers.add(self)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        if self._open and committed.ended:
            self._note_ended(committed.ended)

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        if self._open:
            self._note_ended(removed.ended)

    def _note_ended(self, ended: list[Request]) -> None:
        """Note the tokens of requests whose pages are to be held. Of several choices the first that ends counts: a conversation goes on with one of
        them."""
        for request in ended:
            if (source := self._open.pop(request.id, None)) is not None:
                self._ended.append((source, request.tokens[: max(request.computed, 0)]))

    # ── pins ──

    def pin(self, wish: HoldPrefix) -> PrefixReply:
        """Hold a prompt's pages until `seconds` from now, or until they are released. Another pin of the same name is replaced."""
        until = self._clock() + wish.seconds if wish.seconds > 0 else math.inf
        error = self._pin(wish, until)
        if error:
            return PrefixReply(error=error)
        if self._files is not None:
            self._files.save(SavedPin(wish, until))
        return self.reply(wish.owner)

    def _pin(self, wish: HoldPrefix, until: float) -> str:
        """Hold these pages. → why not; empty: they are held."""
        self.take()
        if not self._cache.prefix_caching:
            return "the prefix cache is off (--no-enable-prefix-caching): nothing can be pinned"
        name: Name = (wish.owner, wish.name, b"")
        keys = keys_of(adapter_root(self._cache.root, wish.space), [*wish.prompt_ids, -1], self._cache.page_size)
        others = {each: len(hold.keys) for each, hold in self._pins.items() if each != name}
        mine = [count for (owner, _, _), count in others.items() if owner == wish.owner]
        most = wish.max_bytes // self._page_bytes if wish.max_bytes >= 0 else self._cache.pool.num_pages // 8
        if len(mine) >= MAX_PINS:
            return f"this key has pinned {MAX_PINS} prefixes, the most there can be: unpin one"
        for room, whose in (
            (most - sum(mine), "this key may pin {} more (--max-pinned-bytes)"),
            (self.max_pages - sum(others.values()), "all keys together may pin {} more, of half of the KV store"),
        ):
            if len(keys) > room:
                left = whose.format(max(0, room) * self._page_bytes)
                return f"the prefix takes {len(keys) * self._page_bytes} bytes of KV pages; {left}"
        self._put(self._pins, name, keys, until)
        return ""

    def restore(self) -> None:
        """Hold what was pinned when the last engine died. next_to_warm() has its pages computed."""
        for saved in [] if self._files is None else self._files.load():
            wish = saved.wish
            error = "its time is over" if saved.until <= self._clock() else self._pin(wish, saved.until)
            if error:
                self._forget_file(wish.owner, wish.name)
                log.warning("the prefix %r is not pinned any more: %s", wish.name, error)
            elif saved.tries >= MAX_TRIES:
                log.warning("the prefix %r is not computed again: %d engines ended with it", wish.name, saved.tries)
            else:
                self.to_warm.append(saved)

    def next_to_warm(self, max_tokens: int) -> GenerateRequest | None:
        """The next request that computes a pinned prefix again, one at a time; None: none is left, or the last one still runs. `max_tokens`: of a
        prompt and an answer of one token."""
        if self._warming is not None:
            return None
        while self.to_warm:
            saved = self.to_warm.popleft()
            wish = saved.wish
            if (wish.owner, wish.name, b"") not in self._pins or len(wish.prompt_ids) >= max_tokens:
                continue
            self._warming = saved
            self._save_tries(saved.tries + 1)
            salt = wish.space.removeprefix("+")  # pins are of the base model
            params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, use_speculation=False, prefix_salt=salt)
            now = self._clock()
            return GenerateRequest(
                f"pin-{len(self.to_warm)}-{now:.6f}",
                wish.prompt_ids,
                params,
                [],
                NO_ORIGIN,
                arrived=now,
                submitted=now,
                owner=wish.owner,
            )
        return None

    def warmed(self) -> None:
        """The request of next_to_warm() has ended."""
        self._save_tries(0)
        self._warming = None

    def _save_tries(self, tries: int) -> None:
        saved = self._warming
        assert saved is not None
        wish = saved.wish
        if self._files is not None and (wish.owner, wish.name, b"") in self._pins:
            self._files.save(SavedPin(wish, saved.until, tries))

    def _forget_file(self, owner: bytes, name: str) -> None:
        if self._files is not None:
            self._files.delete(owner, name)

    def unpin(self, wish: ReleasePrefix) -> PrefixReply:
        """Release a pin. Its pages stay until others need them."""
        self.take()
        name: Name = (wish.owner, wish.name, b"")
        if name not in self._pins:
            return self.reply(wish.owner, error=f"no prefix is pinned under the name {wish.name!r}")
        self._drop(self._pins, name)
        self._find_next()
        self._forget_file(wish.owner, wish.name)
        return self.reply(wish.owner)

    def reply(self, owner: bytes | None, error: str = "") -> PrefixReply:
        """What is pinned by one owner. None: by all owners."""
        owners = [its_owner for its_owner, _, _ in self._pins if owner in (None, its_owner)]
        return PrefixReply(self.pins(owner), error, owners)

    def pins(self, owner: bytes | None) -> list[PinnedPrefix]:
        """What is pinned by one owner, and how much of it is in the prefix cache now. None: by all owners."""
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
        """Begin to hold the conversations whose request has ended since the last step, and end the holds whose time is over."""
        now = self._clock()
        ended, self._ended = self._ended, []
        for source, tokens in ended:
            self._hold_session(source, tokens, now)
        if self._next <= now:
            for holds in (self._sessions, self._pins):
                for name in [name for name, hold in holds.items() if hold.until <= now]:
                    self._drop(holds, name)
                    if holds is self._pins:
                        self._forget_file(name[0], name[1])
            self._find_next()

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
        self._begin()
        old = holds.pop(name, None)
        before = [] if old is None else old.keys
        known, wanted = set(before), set(keys)
        self._change([key for key in keys if key not in known], [key for key in before[::-1] if key not in wanted])
        holds[name] = _Hold(keys, len(keys) * self._cache.page_size, until)
        self._next = min(self._next, until)
        if not self._has_too_much:
            return
        others = [each for each in self._sessions if each != name or holds is self._pins]
        for each in sorted(others, key=lambda one: self._sessions[one].until):
            self._drop(self._sessions, each)
            self.num_dropped += 1
            if not self._has_too_much:
                break
        self._find_next()

    @property
    def _has_too_much(self) -> bool:
        return self._num_pages > self.max_pages or len(self._sessions) > MAX_SESSIONS

    def _drop(self, holds: dict[Name, _Hold], name: Name) -> None:
        """End a hold. _find_next() must follow: once, however many end."""
        self._change([], holds.pop(name).keys[::-1])

    def _find_next(self) -> None:
        holds = (hold.until for each in (self._sessions, self._pins) for hold in each.values())
        self._next = min(holds, default=math.inf)

    def _change(self, held: list[bytes], released: list[bytes]) -> None:
        if not held and not released:
            return
        self._cache.hold(held)
        self._cache.let_go(released)
        self._num_pages += len(held) - len(released)
        self._observers.prefixes_held(held, released)
