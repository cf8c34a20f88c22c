"""Tiers under the real loop: random requests over the oracle device, whose KV cells know what they must hold. Pages go to real files
and come back, in part, late or damaged; engines end at any point and others take over. Every answer must be what it is without tiers."""

import queue
import random
import struct
from collections import deque
from pathlib import Path

import pytest

from octavo.cache import KVCache, audit
from octavo.cache.page_keys import keys_of
from octavo.engine import tier_traffic
from octavo.engine.loop import EngineLoop
from octavo.engine.tier_traffic import TierTraffic
from octavo.kv_tier.folder import TierFolder, folder_secret
from octavo.kv_tier.ram_slots import RamSlots
from octavo.messages import Abort, EngineReport, GenerateRequest, SamplingParams, StepPlan, StepResult
from octavo.messages.params import choice_seed
from octavo.messages.tiers import IN_RAM, Copied, Loaded, TierCounts, TierFailed, TierKnown
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.recording.format import Limited, LoadEnded, read
from octavo.recording.recorder import Recorder, Segments
from octavo.recording.ring import RecordingRing
from octavo.replay.replay import Replay
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed
from octavo.schedule.step_costs import StepCosts
from tests.recording.recorded import header_of
from tests.schedule.oracle import OracleDevice, reference

ROOT = b"r" * 16
CELL = struct.Struct("<qq")


class OracleExecutor:
    """Carries plans out in their order: at once, or as late as their results are asked for, as a device does that computes in the background."""

    def __init__(self, device: OracleDevice, overlap: bool, is_late: bool = False) -> None:
        self.device, self.overlap, self.is_late = device, overlap, is_late
        self._steps: deque[StepPlan | StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._steps.append(plan if self.is_late else self.device.run(plan))

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        return self.device.run(step) if isinstance(step, StepPlan) else step

    def close(self) -> None:
        pass


class OracleMover:
    """Moves the oracle's cells to files, and to memory with slots, and back, a little at each tick. What a load has not brought is filled with
    rubbish."""

    def __init__(
        self, device: OracleDevice, folder: TierFolder | None, dice: random.Random, num_ram_pages: int = 0
    ) -> None:
        self.device, self.folder, self.dice = device, folder, dice
        self.num_ram_pages, self.has_disk = num_ram_pages, folder is not None
        self.ram, self.memory = RamSlots(num_ram_pages), [b""] * num_ram_pages
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.on_event = lambda: None
        self.jobs: deque = deque()
        self.fails, self.laziness = False, 0.5
        if folder is not None:
            self.events.put(TierKnown(*folder.look()))

    def load(self, ticket, keys, pages):
        self.jobs.append(("load", ticket, keys, pages))

    def store(self, keys, pages, level="disk"):
        self.jobs.append(("copy", keys, pages, level))

    def approve(self, are_right):
        self.jobs.append(("write", are_right))

    def delete_all(self):
        self.ram.clear()
        if self.folder is not None:
            self.folder.delete_all()

    def counts(self):
        if self.folder is None:
            return TierCounts(ram_bytes=len(self.ram))
        return TierCounts(self.folder.num_bytes, self.folder.num_bad, self.folder.num_evicted, len(self.ram))

    def close(self):
        pass

    def tick(self) -> None:
        if not self.jobs or self.dice.random() < self.laziness:
            return
        job, *arguments = self.jobs.popleft()
        getattr(self, "_" + job)(*arguments)

    def _load(self, ticket, keys, pages):
        size = self.device.page_size
        done, num_from_ram, dropped = 0, 0, []
        contents: list[bytes] = []
        while done < len(keys):
            slots = self.ram.begin_read(keys[done:])
            contents += [self.memory[slot] for slot in slots]
            self.ram.end_read(slots)
            num_from_ram, done = num_from_ram + len(slots), done + len(slots)
            wanted = self.ram.num_missing(keys[done:])
            buffers = [bytearray(size * CELL.size) for _ in range(wanted)]
            count = 0
            if self.folder is not None:
                count, changes = self.folder.read(keys[done : done + wanted], [[memoryview(each)] for each in buffers])
                dropped += changes.dropped
            contents += map(bytes, buffers[:count])
            done += count
            if count < wanted:
                break
        for number, page in enumerate(pages):
            self.device.cells[page] = [*CELL.iter_unpack(contents[number])] if number < done else [(-9, -9)] * size
        self.events.put(Loaded(ticket, done, dropped, 0.001, num_from_ram, 0.0005))

    def _copy(self, keys, pages, level):
        self.keys, self.level = keys, level
        self.copies = []
        for key, page in zip(keys, pages, strict=True):
            if page == IN_RAM:
                slots = self.ram.begin_read([key])
                self.copies.append(self.memory[slots[0]] if slots else b"")
                self.ram.end_read(slots)
            else:
                cells = self.device.cells.get(page) or [(-8, -8)] * self.device.page_size
                self.copies.append(b"".join(CELL.pack(*cell) for cell in cells))
        if level == "ram":
            self.slots, self.dropped = self.ram.reserve(len(keys))
        self.events.put(Copied())

    def _write(self, are_right):
        if self.level == "ram":
            count = len(self.slots)
            for slot, copy in zip(self.slots, self.copies, strict=False):
                self.memory[slot] = copy
            stored = self.ram.fill(self.keys[:count], self.slots, are_right[:count])
            self.events.put(TierKnown(stored, self.dropped, 0.001, True, "ram"))
            return
        right = [at for at, is_right in enumerate(are_right) if is_right and self.copies[at]]
        keys = [self.keys[at] for at in right]
        if self.fails:
            self.events.put(TierFailed(keys, 3.0))
            return
        copies = [[memoryview(self.copies[at])] for at in right]
        changes = self.folder.write(keys, copies) if keys else ([], [])
        self.events.put(TierKnown(*changes, 0.001, True))


class Loads(StepObserver):
    def __init__(self) -> None:
        self.began: dict[int, int] = {}

    def load_began(self, ticket, held, count, now):
        self.began[ticket] = count

    def load_ended(self, ticket, count, keys, now):
        assert self.began.pop(ticket) == count >= len(keys)


class Case:
    def __init__(
        self, seed: int, path: Path, is_slow: bool = False, traffic_type=TierTraffic, record_to: Path | None = None
    ) -> None:
        self.is_slow = is_slow  # moves take many steps, and pages are scarce
        self.traffic_type, self.record_to = traffic_type, record_to
        r = self.dice = random.Random(seed)
        self.path, self.now = path, 0.0
        self.page_size, self.overlap = r.choice([1, 2, 3]), r.random() < 0.5
        self.budget, self.rows, self.num_pages = r.choice([3, 8, 32]), r.choice([1, 3, 6]), r.choice([16, 24, 60])
        if is_slow:
            self.num_pages = 8
        self.max_bytes = r.choice([10**7, 5000 * 6])
        self.num_ram_pages = r.choice([0, 0, 3, 8, 60])
        self.has_disk = self.num_ram_pages < 8 or r.random() < 0.5
        bases = [[r.randrange(7) for _ in range(r.randrange(4, 20))] for _ in range(3)]
        self.sources: list[GenerateRequest] = []
        for number in range(40):
            base = r.choice(bases)
            prompt = base[: r.randrange(2, len(base) + 1)] + [r.randrange(7) for _ in range(r.randrange(0, 5))]
            params = SamplingParams(seed=number, max_tokens=r.randrange(1, 8), temperature=1.0)
            self.sources.append(GenerateRequest(f"r{number}", prompt[:16], params, []))
        self.got: dict[str, list[int]] = {source.id: [] for source in self.sources}
        self.finished: set[str] = set()
        self.aborted: set[str] = set()
        self.totals = {"loaded": 0, "missed": 0, "held": 0, "deaths": 0, "failures": 0, "late": 0, "damaged": 0,
                       "from ram": 0}  # fmt: skip
        self.start_engine()

    def start_engine(self) -> None:
        folder_secret(self.path)
        cache = KVCache(self.num_pages // self.page_size + 16, self.page_size, root=ROOT)
        scheduler = Scheduler(cache, self.rows, self.budget)
        if self.dice.random() < 0.7:
            scheduler.learn(StepCosts(1.0, 1.0, 1.0, 0.0, 0.0))
        device = OracleDevice(self.page_size, self.rows)
        folder = TierFolder(self.path, self.max_bytes, "layout", self.page_size * CELL.size) if self.has_disk else None
        self.mover = OracleMover(device, folder, self.dice, self.num_ram_pages)
        self.mover.laziness = 0.95 if self.is_slow else 0.5
        observers = Observers([Loads()], lambda: self.now)
        executor = OracleExecutor(device, self.overlap, is_late=self.dice.random() < 0.5)
        self.loop = EngineLoop(scheduler, executor, observers)
        self.loop.open_tier(self.traffic_type(scheduler, self.mover, observers, lambda: self.now))
        self.recorder: Recorder | None = None
        if self.record_to is not None:
            report = EngineReport(
                "none", "float32", 7, 64, self.rows, self.budget, self.page_size, cache.pool.num_pages, 0, 0, 1
            )
            header = header_of(report, True, False)
            self.recorder = Recorder(Segments(self.record_to, "1", 2**24), header, RecordingRing())
            self.loop.record(self.recorder)
        self.loop.take_tier_events()

    def limit(self) -> None:
        """Memory is scarce, or is not: cached pages go and may come."""
        pool = self.loop.scheduler.cache.pool
        num_warm = self.dice.choice([0, pool.num_pages // 4, pool.num_pages // 2, pool.num_pages])
        pool.limit_touched(num_warm)
        self.loop.observers.idle_limited(num_warm)

    def run(self) -> None:
        dice, arrivals = self.dice, deque(self.sources)
        for _ in range(6000):
            self.now += 0.01
            if arrivals and dice.random() < 0.3:
                self.loop.add(arrivals.popleft())
            self.mover.fails = dice.random() < 0.1
            if dice.random() < 0.02:
                self.damage()
            if dice.random() < 0.01 and self.record_to is None:
                self.die(arrivals)
            if dice.random() < 0.02:
                self.limit()
            if dice.random() < 0.02 and self.recorder is not None:
                self.recorder.is_due = True
            if dice.random() < 0.01:
                self.loop.reset_prefixes()
            if dice.random() < 0.02:
                self.abort(arrivals)
            for _ in range(dice.randrange(3)):
                self.mover.tick()
            if self.loop.has_work:
                self.take(self.loop.step())
            elif not arrivals:
                break
            else:
                self.loop.take_tier_events()
            assert not audit(self.loop.scheduler.cache, self.loop.scheduler.is_idle)
        else:
            raise AssertionError("requests do not end")
        stats = self.loop.tier.stats
        self.count(stats)
        while self.mover.jobs or not self.mover.events.empty():
            self.mover.tick()
            self.loop.take_tier_events()
        cache = self.loop.scheduler.cache
        assert not cache.loads and not audit(cache, True), "every page that a load took came back"
        for source in self.sources:
            if source.id not in self.aborted:
                expected = reference(
                    source.prompt_ids, choice_seed(source.params.seed, 0), source.params.max_tokens, [], 0
                )
                assert self.got[source.id] == expected, "another answer than without tiers"

    def take(self, deltas) -> None:
        for delta in deltas:
            self.got[delta.request_id] += delta.token_ids
            if delta.finish is not None:
                self.finished.add(delta.request_id)

    def damage(self) -> None:
        files = sorted(self.path.glob("*/*.kv"))
        if files:
            file = self.dice.choice(files)
            content = bytearray(file.read_bytes())
            if self.dice.random() < 0.3:
                del content[self.dice.randrange(len(content)) :]
            else:
                content[self.dice.randrange(len(content))] ^= 0x10
            file.write_bytes(content)
            self.totals["damaged"] += 1

    def abort(self, arrivals) -> None:
        waiting = {source.id for source in arrivals}
        live = [source.id for source in self.sources if source.id not in self.finished | self.aborted | waiting]
        if live:
            victim = self.dice.choice(live)
            self.loop.abort(Abort(victim))
            self.aborted.add(victim)
            assert not self.loop.has(victim)

    def count(self, stats) -> None:
        self.totals["loaded"] += stats.loaded_pages
        self.totals["missed"] += stats.missed_pages
        self.totals["failures"] += stats.failures
        self.totals["late"] += stats.late
        self.totals["from ram"] += stats.ram_loaded_pages

    def die(self, arrivals) -> None:
        """The engine ends, in the midst of anything; another goes on with the tokens that clients have."""
        self.count(self.loop.tier.stats)
        self.totals["deaths"] += 1
        waiting = {source.id for source in arrivals}
        self.start_engine()
        for source in self.sources:
            if source.id not in self.finished | self.aborted | waiting:
                begun = [list(self.got[source.id])] if self.got[source.id] else []
                self.loop.add(GenerateRequest(source.id, source.prompt_ids, source.params, [], begun=begun))


def test_answers_are_the_same_with_tiers_whatever_happens_to_them(tmp_path):
    totals: dict[str, int] = {}
    for seed in range(40):
        case = Case(seed, tmp_path / str(seed), seed % 3 == 0)
        try:
            case.run()
        except BaseException:
            print("seed", seed)
            raise
        for name, count in case.totals.items():
            totals[name] = totals.get(name, 0) + count
    assert all(totals[name] for name in ("loaded", "missed", "deaths", "failures", "damaged", "from ram")), totals


def test_plans_beside_loads_and_scarce_memory_are_made_again_from_a_recording(tmp_path):
    num_loads = num_limits = 0
    for seed in range(8):
        records = tmp_path / f"records{seed}"
        records.mkdir()
        case = Case(seed, tmp_path / str(seed), seed % 2 == 0, record_to=records)
        case.run()
        case.loop.close()
        recording = read(records)
        num_loads += sum(isinstance(record, LoadEnded) and bool(record.keys) for record in recording.records)
        num_limits += sum(isinstance(record, Limited) for record in recording.records)
        for file in (records, *sorted(records.glob("*.segment"))[1:]):
            replay = Replay(read(file))
            for _ in replay.follow():
                pass
            assert replay.num_same == replay.num_steps, f"seed {seed}"
    assert num_loads > 5 and num_limits > 5


def test_a_copy_of_a_page_that_was_evicted_meanwhile_is_not_stored(tmp_path):
    """A planted fault: without the check of generations, the oracle must find a wrong page."""

    class Careless(TierTraffic):
        def _approve(self) -> None:
            self._mover.approve([True] * len(self._copying))

    with pytest.raises((AssertionError, KeyError)):
        for seed in range(60):
            Case(seed, tmp_path / str(seed), True, Careless).run()


def build(tmp_path: Path, costs: StepCosts | None, num_pages: int = 64, is_late: bool = False):
    cache = KVCache(num_pages, 2, root=ROOT)
    scheduler = Scheduler(cache, 4, 16)
    if costs is not None:
        scheduler.learn(costs)
    device = OracleDevice(2, 4)
    folder_secret(tmp_path)
    mover = OracleMover(device, TierFolder(tmp_path, 10**6, "layout", 2 * CELL.size), random.Random(0))
    now = [0.0]
    observers = Observers([], lambda: now[0])
    loop = EngineLoop(scheduler, OracleExecutor(device, is_late, is_late), observers)
    loop.open_tier(TierTraffic(scheduler, mover, observers, lambda: now[0]))
    loop.take_tier_events()
    return loop, mover, now


def request(name: str, prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(seed=0, max_tokens=1), [])


PROMPT = list(range(20))


def filled(tmp_path: Path) -> None:
    folder_secret(tmp_path)
    folder = TierFolder(tmp_path, 10**6, "layout", 2 * CELL.size)
    keys = keys_of(ROOT, PROMPT, 2)
    contents = [CELL.pack(2 * i, 2 * i) + CELL.pack(2 * i + 1, 2 * i + 1) for i in range(len(keys))]
    folder.write(keys, [[memoryview(content)] for content in contents])


def test_a_prefix_that_is_computed_faster_is_not_loaded(tmp_path):
    filled(tmp_path)
    loop, _, _ = build(tmp_path, StepCosts(1e-6, 1e-6, 1e-6, 0.0, 0.0))
    loop.add(request("a", PROMPT))
    assert loop.scheduler.has("a") and loop.tier.stats.slower == 1
    loop, _, _ = build(tmp_path, StepCosts(1.0, 1e-6, 1e-6, 0.0, 0.0))
    loop.add(request("a", PROMPT))
    assert not loop.scheduler.has("a") and loop.has("a") and loop.has_work


def test_a_fit_that_takes_prompts_for_free_is_held_against_measured_steps(tmp_path):
    """Beside many decoding rows the fitted costs of prompts can come out far too low. So can a step's time: of one that was over when the host came to
    look."""
    filled(tmp_path)
    loop, _, _ = build(tmp_path, StepCosts(1e-6, 1e-6, 1e-9, 0.0, 0.0))
    for num_tokens, seconds in ((512, 0.64), (256, 0.5), (4, 1e-9), (512, 1e-6), (512, 0.66)):
        plan = StepPlan(0, [], [], [], [], [], [], [], [], [], [], [])
        loop.tier.committed(Committed(plan, StepResult(0, []), num_tokens, [], [], [], []), StepTimes(0.0, seconds))
    loop.add(request("a", PROMPT))
    assert not loop.scheduler.has("a") and not loop.tier.stats.slower, "18 tokens took 22 ms, not 20 µs"


def test_a_request_does_not_wait_for_a_disk_that_hangs(tmp_path):
    filled(tmp_path)
    loop, mover, now = build(tmp_path, None)
    loop.add(request("a", PROMPT))
    loop.add(request("b", PROMPT))
    assert loop.tier.num_held == 2 and len(mover.jobs) == 1, "one load for both"
    assert loop.step() == [] and loop.tier.num_held == 2
    now[0] += tier_traffic.LEAST_PATIENCE
    while loop.has_work:
        loop.step()
    assert loop.tier.stats.late == 2 and not loop.tier.num_held
    loop.add(request("c", PROMPT))
    assert loop.scheduler.has("c"), "the tier is not asked for a while"
    assert loop.scheduler.cache.loads, "the pages of the load are still its own"
    while mover.jobs:
        mover.tick()
    loop.take_tier_events()
    assert not loop.scheduler.cache.loads


def test_a_load_waits_for_the_step_that_may_still_write_to_its_pages(tmp_path):
    """A request that is aborted gives its pages back at once, while a step that is being computed still writes to them."""
    filled(tmp_path)
    loop, mover, _ = build(tmp_path, None, num_pages=11, is_late=True)
    mover.laziness = -1.0
    loop.add(GenerateRequest("gone", [7, 7, 7], SamplingParams(seed=1, max_tokens=40), []))
    loop.step()
    loop.step()
    loop.abort(Abort("gone"))
    loop.add(request("a", PROMPT))
    assert loop.tier.num_held == 1
    got: list[int] = []
    while loop.has_work:
        while mover.jobs:
            mover.tick()
        got += [token for delta in loop.step() if delta.request_id == "a" for token in delta.token_ids]
    assert loop.tier.stats.loaded_pages == 9
    assert got == reference(PROMPT, choice_seed(0, 0), 1, [], 0)


def test_a_journey_shows_the_load(tmp_path):
    filled(tmp_path)
    loop, mover, now = build(tmp_path, None)
    journal, ended = EngineJournal(), []
    journal.on_end = ended.append
    loop.observers.add(journal)
    loop.add(request("a", PROMPT))
    now[0] = 1.5
    while mover.jobs:
        mover.tick()
    while loop.has_work:
        loop.step()
    load, queue_stage, prefill, *_ = ended[0].tracks[0].stages
    assert (load.name, load.start, load.end, load.cached_tokens) == ("load", 0.0, 1.5, 18)
    assert queue_stage.name == "queue" and prefill.name == "prefill" and prefill.cached_tokens == 18


def test_loads_leave_pages_for_others_and_the_rest_is_computed(tmp_path):
    filled(tmp_path)
    loop, mover, _ = build(tmp_path, None, num_pages=8)
    loop.add(request("a", PROMPT))
    assert [len(pages) for pages in loop.scheduler.cache.loads.values()] == [7], "one stays free"
    loop, mover, _ = build(tmp_path, None, num_pages=16)
    loop.add(request("a", PROMPT[:9]))
    loop.add(request("b", PROMPT))
    assert [len(pages) for pages in loop.scheduler.cache.loads.values()] == [4], "the second waits for the first"
    while loop.has_work:
        mover.tick()
        loop.step()
    assert loop.tier.stats.loaded_pages == 9
