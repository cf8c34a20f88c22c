"""TierTraffic: which prefixes are loaded from tiers, and which pages are stored there. It runs on the stepping thread; a mover moves the
bytes beside the steps (worker/page_mover.py).

A request whose prefix is in the tier, and is read faster than it is computed, is held before it enters the scheduler, while the pages
are loaded into the prefix cache; then it is added like any other, and finds them there. So a load is two inputs of the cache,
which are recorded (decision 047); the scheduler needs no code for tiers.

Pages are stored behind the steps: a run at a time, for a small share of the time while the engine is busy, a larger one where prefixes do come again,
and without a limit while it is idle. A disk gets every page, because pages there outlive the server. Memory of the host gets those that the KV store
would evict next: it is often smaller than the store, and a second copy of a page that stays there is worth nothing."""

import logging
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from octavo.cache import KVCache
from octavo.cache.page_keys import adapter_root, keys_of
from octavo.executor.base import TierMover
from octavo.messages import Abort, GenerateRequest
from octavo.messages.tiers import IN_RAM, Copied, Level, Loaded, TierFailed, TierKnown
from octavo.observe.metrics.gauges import TierState
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed, Planned
from octavo.schedule.step_costs import StepCosts

log = logging.getLogger("octavo.engine")

RUN_PAGES = 32  # most pages in one file
MAX_HELD = 256  # requests that wait for loads; further ones are computed
MAX_LOADS = 3  # of one request, one after the other
BASE_SECONDS = 0.002  # of a load of any size
LEAST_PATIENCE = 2.0  # seconds that a request waits for a load at least, however fast it should be
BUSY_SHARE, HIT_SHARE = (
    0.01,
    0.10,
)  # of the time, for storing pages beside steps: where no prefix comes again, and where all do
MAX_CREDIT = 0.5  # seconds of storing that a pause can save up
MAX_DROPS = 3  # loads in a row that found nothing, after which tier and loads pause
DROP_PAUSE = 30.0
BULK_TOKENS = 256  # of a step whose pace is that of prompts
NUM_PACES = 12  # such steps whose pace is remembered
SCAN_SECONDS = 0.05  # between two looks at which pages would be evicted next
RAM_WINDOW = 0.5  # of the pages that fit into memory of the host: as many of the next evicted pages are to be there
MAX_CUTS = 64  # places where a prefix goes on in another level, that are weighed
CLOSE_SECONDS = 2.0  # for storing what is left when the engine ends


@dataclass(slots=True)
class _Held:
    request: GenerateRequest
    keys: list[bytes]
    num_loads: int  # so far
    since: float
    until: float  # when it is added, load or no load
    num_loaded: int = 0  # tokens


class Released(NamedTuple):
    """A request that waits for loads no more."""

    request: GenerateRequest
    since: float  # when it began to wait
    num_loaded: int  # tokens


@dataclass(slots=True)
class _Load:
    keys: list[bytes]
    held: list[_Held]
    num_tokens_before: int


@dataclass(slots=True)
class TierStats:
    """Since the start."""

    num_keys: int = 0  # pages that are in files
    num_in_ram: int = 0  # pages that are in memory of the host
    loads: int = 0
    loaded_pages: int = 0
    missed_pages: int = 0  # that a load was to bring, and that were gone or bad
    load_seconds: float = 0.0
    saved_seconds: float = 0.0  # what computing would have taken, by the measured costs, less the load
    stored_pages: int = 0
    store_seconds: float = 0.0
    failures: int = 0  # stores that the disk refused
    slower: int = 0  # requests whose prefix was in the tier, and is computed faster
    late: int = 0  # requests that went on before their load was over
    ram_loaded_pages: int = 0
    ram_stored_pages: int = 0


class TierTraffic(StepObserver):
    is_essential = True  # the loop asks it for requests in every step

    def __init__(
        self, scheduler: Scheduler, mover: TierMover, observers: Observers, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._mover, self._observers, self._clock = scheduler, mover, observers, clock
        self._cache: KVCache = scheduler.cache
        self._cache.watch_pages()
        self.stats = TierStats()
        # Keys that each level has, and measured seconds of a page's load from there; 0: not measured.
        self._known: dict[Level, set[bytes]] = {"ram": set(), "disk": set()}
        self._in_ram, self._on_disk = self._known["ram"], self._known["disk"]
        self._page_seconds: dict[Level, float] = {"ram": 0.0, "disk": 0.0}
        self._loads: dict[int, _Load] = {}  # by ticket
        self._loading: dict[bytes, int] = {}  # key → ticket
        self._by_id: dict[str, _Held] = {}
        self._next_ticket = 0
        # Steps that were submitted and committed. A step in flight may still write to pages that were free when a load took them, for a
        # request that has left: a load begins when the steps that were submitted before it are committed.
        self._num_submitted = self._num_committed = 0
        self._not_begun: deque[tuple[int, int, list[bytes], list[int]]] = deque()  # (steps, ticket, keys, pages)
        # Seconds for each token of the last steps that computed many, and a good pace among them; 0: not measured.
        self._paces: deque[float] = deque(maxlen=NUM_PACES)
        self._token_seconds = 0.0
        self._num_empty = 0  # loads in a row that found nothing
        self._paused_until = 0.0
        self._unstored: OrderedDict[bytes, int] = OrderedDict()  # key → step whose commit completes the page
        self._leaving: deque[bytes] = (
            deque()
        )  # keys of pages that would be evicted next and are not in memory of the host
        self._leaving_step = 0  # the last step that may fill one of them
        self._scanned_at = -SCAN_SECONDS
        self._is_closing = False
        self._copying: list[tuple[bytes, int, int]] = []  # (key, page, its generation): the run that is being stored
        self._credit, self._credited_at = MAX_CREDIT, clock()
        self._store_paused_until = 0.0
        self._hits = self._queries = 0.0  # recent tokens
        self._counted = (0, 0)

    def on_event(self, wake: Callable[[], None]) -> None:
        """Let the mover's threads wake an engine that sleeps."""
        self._mover.on_event = wake

    @property
    def num_held(self) -> int:
        return len(self._by_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._by_id

    def state(self) -> TierState:
        """For metrics."""
        stats = self.stats
        counts = self._mover.counts()
        return TierState(
            counts.disk_bytes,
            stats.num_keys,
            stats.loads,
            stats.loaded_pages,
            stats.missed_pages,
            stats.load_seconds,
            stats.saved_seconds,
            stats.stored_pages,
            stats.store_seconds,
            {"slower": stats.slower, "late": stats.late},
            {"bad": counts.num_bad, "evicted": counts.num_evicted, "failed": stats.failures},
            counts.ram_bytes,
            stats.num_in_ram,
            stats.ram_loaded_pages,
            stats.ram_stored_pages,
        )

    # ── loads ──

    def hold(self, request: GenerateRequest) -> bool:
        """Begin to load the request's prefix, or join a load that brings it. False: it can be added now."""
        params = request.params
        if request.needs_one_step or params.prompt_logprobs is not None:
            return False
        if not (self._in_ram or self._on_disk or self._loading):
            return False
        if len(self._by_id) >= MAX_HELD or self._clock() < self._paused_until:
            return False
        begun = next((tokens for tokens in request.begun if tokens), [])
        root = adapter_root(self._cache.root, params.prefix_space)
        keys = keys_of(root, [*request.prompt_ids, *begun], self._cache.page_size)
        held = _Held(request, keys, 0, self._clock(), 0.0)
        if not self._hold(held):
            return False
        self._by_id[request.id] = held
        return True

    def _hold(self, held: _Held) -> bool:
        keys, index = held.keys, self._cache.pool.index
        found = next((i for i, key in enumerate(keys) if key not in index), len(keys))
        if found == len(keys) or held.num_loads >= MAX_LOADS:
            return False
        held.num_loads += 1
        if (ticket := self._loading.get(keys[found])) is not None:
            self._loads[ticket].held.append(held)
            held.until = self._clock() + LEAST_PATIENCE
            return True
        stretches = self._stretches(keys, found, self._room(keys[:found]))
        if not stretches:
            return False
        count, load_seconds = self._worth_loading(found, stretches)
        if not count:
            self.stats.slower += 1
            return False
        pages = self._cache.begin_load(self._next_ticket, keys[:found], count)
        if pages is None:
            return False
        ticket = self._next_ticket
        self._next_ticket += 1
        self._observers.load_began(ticket, keys[:found], count)
        wanted = keys[found : found + count]
        self._loads[ticket] = _Load(wanted, [held], found)
        self._loading.update(dict.fromkeys(wanted, ticket))
        held.until = self._clock() + max(LEAST_PATIENCE, 4 * load_seconds)
        self._not_begun.append((self._num_submitted, ticket, wanted, pages))
        self._begin_loads()
        return True

    def _begin_loads(self) -> None:
        while self._not_begun and self._not_begun[0][0] <= self._num_committed:
            _, ticket, keys, pages = self._not_begun.popleft()
            self._mover.load(ticket, keys, pages)

    def _stretches(self, keys: list[bytes], found: int, room: int) -> list[tuple[int, float]]:
        """The pages from `found` on, as far as the tiers have them and there is room, in stretches that come from one level: (pages, seconds of
        each page's load)."""
        in_ram, on_disk = self._in_ram, self._on_disk
        stretches: list[tuple[int, float]] = []
        for key in islice(keys, found, found + max(0, room)):
            if key in in_ram:
                pace = self._page_seconds["ram"]
            elif key in on_disk:
                pace = self._page_seconds["disk"]
            else:
                break
            if stretches and stretches[-1][1] == pace:
                stretches[-1] = (stretches[-1][0] + 1, pace)
            else:
                stretches.append((1, pace))
        return stretches

    def _worth_loading(self, found: int, stretches: list[tuple[int, float]]) -> tuple[int, float]:
        """How many of these pages are to be loaded, so that loading them and computing the others takes least, and the seconds of the load; 0:
        computing all is fastest. A page costs more to compute the deeper it is, and the same to load within a stretch: the best place to stop
        is the end of a stretch."""
        best, best_gain, best_seconds = 0, 0.0, 0.0
        count, seconds = 0, BASE_SECONDS
        for number, pace in stretches[:MAX_CUTS]:
            count += number
            seconds += number * pace
            gain = self._compute_seconds(found, count) - seconds
            if gain > best_gain or gain == float("inf"):
                best, best_gain, best_seconds = count, gain, seconds
        return best, best_seconds

    def _room(self, held: list[bytes]) -> int:
        """Pages that a load may take, beside those that are held for it: a page stays free for each running request, and loads beside another one
        take at most half of what is free, so that they do not keep requests from running."""
        pool = self._cache.pool
        free = pool.num_free - sum(pool.refs[pool.index[key]] == 0 for key in held)
        return free // 2 if self._loads else free - len(self._scheduler.running) - 1

    def _compute_seconds(self, start: int, count: int) -> float:
        """What computing these pages takes, by the measured costs of steps, and no less than at a good pace among those measured: the costs are
        fitted to all steps, and may be far off for prompts where most steps have none. Infinite: not known yet."""
        costs: StepCosts | None = self._scheduler.costs
        if costs is None:
            return float("inf")
        num_tokens = count * self._cache.page_size
        num_steps = -(-num_tokens // self._scheduler.max_step_tokens)
        seconds = num_steps * costs.step + costs.chunk_seconds(start * self._cache.page_size, num_tokens)
        return max(seconds, num_tokens * self._token_seconds)

    def drop(self, abort: Abort) -> tuple[bool, GenerateRequest | None]:
        """A held request is aborted: (whether it was held, the request that is to be added first, because some choices go on)."""
        held = self._by_id.pop(abort.request_id, None)
        if held is None:
            return False, None
        for load in self._loads.values():
            if held in load.held:
                load.held.remove(held)
        return True, held.request if abort.index >= 0 and held.request.params.n > 1 else None

    def take(self, seconds: float = 0.0) -> list[Released]:
        """Take in what the mover tells; wait for it at most so long. Returns the requests that are to be added now."""
        ready: list[Released] = []
        events = self._mover.events
        try:
            event = events.get(seconds > 0, seconds)
            while True:
                match event:
                    case Loaded():
                        ready += self._end_load(event)
                    case Copied():
                        self._approve()
                    case TierKnown():
                        self._note_known(event)
                    case TierFailed():
                        self._copying = []
                        self.stats.failures += 1
                        self._store_paused_until = self._clock() + event.pause
                event = events.get_nowait()
        except queue.Empty:
            pass
        if self._by_id:
            ready += self._overdue()
        return ready

    def _end_load(self, event: Loaded) -> list[Released]:
        load = self._loads.pop(event.ticket)
        keys = load.keys[: event.count]
        self._cache.end_load(event.ticket, len(load.keys), keys)
        self._observers.load_ended(event.ticket, len(load.keys), keys)
        for key in load.keys:
            del self._loading[key]
        self._on_disk.difference_update(event.dropped)
        self._on_disk.difference_update(load.keys[event.count :])
        self._in_ram.difference_update(load.keys[event.count : event.count + 1])
        stats, count = self.stats, len(keys)
        stats.loads += 1
        stats.loaded_pages += count
        stats.ram_loaded_pages += event.num_from_ram
        stats.missed_pages += len(load.keys) - count
        stats.load_seconds += event.seconds
        stats.num_keys = len(self._on_disk)
        self._learn_pace("ram", event.num_from_ram, event.ram_seconds)
        self._learn_pace("disk", event.count - event.num_from_ram, event.seconds - event.ram_seconds)
        if count:
            saved = self._compute_seconds(load.num_tokens_before, count)
            stats.saved_seconds += 0.0 if saved == float("inf") else max(0.0, saved - event.seconds)
            self._num_empty = 0
        else:
            self._num_empty += 1
            if self._num_empty >= MAX_DROPS:
                self._num_empty, self._paused_until = 0, self._clock() + DROP_PAUSE
                log.warning(
                    "the last %d loads from the KV tier found nothing: it is not asked for %d s", MAX_DROPS, DROP_PAUSE
                )
        ready = []
        for held in load.held:
            held.num_loaded += count * self._cache.page_size
            if not (count == len(load.keys) and self._hold(held)):
                del self._by_id[held.request.id]
                ready.append(Released(held.request, held.since, held.num_loaded))
        return ready

    def _learn_pace(self, level: Level, num_pages: int, seconds: float) -> None:
        if num_pages:
            known = self._page_seconds[level]
            self._page_seconds[level] += (0.5 if known else 1.0) * (seconds / num_pages - known)

    def _overdue(self) -> list[Released]:
        """Requests that have waited for too long: the disk is slow or hangs. Their pages come back when it answers."""
        now = self._clock()
        late = [held for held in self._by_id.values() if now >= held.until]
        for held in late:
            del self._by_id[held.request.id]
            for load in self._loads.values():
                if held in load.held:
                    load.held.remove(held)
        if late:
            self.stats.late += len(late)
            self._paused_until = now + DROP_PAUSE
            log.warning(
                "%d requests go on without the KV tier, which is too slow: it is not asked for %d s",
                len(late),
                DROP_PAUSE,
            )
        return [Released(held.request, held.since, held.num_loaded) for held in late]

    def reset(self) -> None:
        """The prefix cache was emptied: so is the tier."""
        self._in_ram.clear()
        self._on_disk.clear()
        self._unstored.clear()
        self._leaving.clear()
        self.stats.num_keys = self.stats.num_in_ram = 0
        self._mover.delete_all()

    def close(self) -> None:
        """Store what is left, as far as that is quick, and stop."""
        until = self._clock() + CLOSE_SECONDS
        self._leaving.clear()
        self._is_closing = True  # memory of the host ends with the engine: nothing more is stored there
        while (self._unstored or self._copying) and self._store_paused_until <= self._clock() < until:
            self.offer(0, is_urgent=True)
            self.take(0.05)
        self._mover.close()

    # ── stores ──

    def planned(self, planned: Planned, now: float) -> None:
        self._num_submitted += not planned.is_empty
        self._note(planned.pages.stored)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._num_committed += 1
        self._begin_loads()
        if committed.num_tokens >= BULK_TOKENS and times.compute_seconds > 0:
            self._learn_compute_pace(times.compute_seconds / committed.num_tokens)
        self._note(committed.pages.stored)

    def _learn_compute_pace(self, pace: float) -> None:
        """Other work slows a step down, so the better paces count. The best may be wrong by far: a step seems short that was over when the host
        came to look."""
        self._paces.append(pace)
        self._token_seconds = sorted(self._paces)[len(self._paces) // 3]

    def _note(self, stored: Iterable[bytes]) -> None:
        """These pages became findable; they are complete once all plans made so far are committed."""
        if self._mover.has_disk:
            for key in stored:
                if key not in self._on_disk:
                    self._unstored[key] = self._scheduler.num_steps

    def offer(self, num_in_flight: int, is_urgent: bool = False) -> None:
        """Begin to store a run of pages, if there is time for it, or if it is urgent."""
        if self._copying:
            return
        now = self._clock()
        is_busy = self._scheduler.has_work or num_in_flight > 0
        if not self._leaving and (now - self._scanned_at >= SCAN_SECONDS or not is_busy):
            self._scanned_at = now
            self._scan(is_busy)
        if not (self._unstored or self._leaving):
            return
        self._credit = min(MAX_CREDIT, self._credit + (now - self._credited_at) * self._share())
        self._credited_at = now
        if is_busy and self._credit <= 0 and not is_urgent:
            return
        num_committed = self._scheduler.num_steps - num_in_flight
        level: Level = "ram"
        if self._leaving and self._leaving_step <= num_committed:
            self._take_leaving()
        if not self._copying and now >= self._store_paused_until:
            level = "disk"
            self._take_unstored(num_committed)
        if self._copying:
            self._mover.store([key for key, _, _ in self._copying], [page for _, page, _ in self._copying], level)

    def _scan(self, is_busy: bool) -> None:
        """Which pages would be evicted next and are not in memory of the host. While many pages are blank, none would be soon; an idle engine
        has the time to store those that come later."""
        pool, in_ram = self._cache.pool, self._in_ram
        window = int(RAM_WINDOW * self._mover.num_ram_pages) - (len(pool.blank) if is_busy else 0)
        if window <= 0 or self._is_closing:
            return
        keys = (pool.keys[page] for page in islice(pool.cached, window))
        self._leaving.extend(key for key in keys if key is not None and key not in in_ram)
        self._leaving_step = self._scheduler.num_steps

    def _take_leaving(self) -> None:
        pool = self._cache.pool
        while self._leaving and len(self._copying) < RUN_PAGES:
            key = self._leaving.popleft()
            page = pool.index.get(key)
            if page is not None and key not in self._in_ram:
                self._copying.append((key, page, pool.generations[page]))

    def _take_unstored(self, num_committed: int) -> None:
        pool = self._cache.pool
        gone = []
        for key, step in self._unstored.items():
            if step > num_committed or len(self._copying) == RUN_PAGES:
                break
            gone.append(key)
            page = pool.index.get(key)
            if key in self._on_disk:
                continue
            if page is not None:
                self._copying.append((key, page, pool.generations[page]))
            elif key in self._in_ram:
                self._copying.append((key, IN_RAM, 0))
        for key in gone:
            del self._unstored[key]

    def _share(self) -> float:
        """Of the time, for storing: more where prefixes come again."""
        hits, queries = self._cache.hit_tokens, self._cache.queried_tokens
        self._hits += hits - self._counted[0]
        self._queries += queries - self._counted[1]
        self._counted = (hits, queries)
        if self._queries > 100_000:
            self._hits, self._queries = self._hits / 2, self._queries / 2
        return BUSY_SHARE + (HIT_SHARE - BUSY_SHARE) * (self._hits / self._queries if self._queries else 0.0)

    def _approve(self) -> None:
        pool = self._cache.pool
        self._mover.approve(
            [
                page == IN_RAM or (pool.keys[page] == key and pool.generations[page] == generation)
                for key, page, generation in self._copying
            ]
        )

    def _note_known(self, event: TierKnown) -> None:
        known = self._known[event.level]
        known.difference_update(event.dropped)
        known.update(event.stored)
        self.stats.num_keys, self.stats.num_in_ram = len(self._on_disk), len(self._in_ram)
        if event.ends_store:
            self.stats.stored_pages += len(event.stored)
            self.stats.ram_stored_pages += len(event.stored) if event.level == "ram" else 0
            self.stats.store_seconds += event.seconds
            self._credit -= event.seconds
            self._copying = []
