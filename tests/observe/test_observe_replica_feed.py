"""ReplicaFeed on a real loop: an index that follows its events holds what the cache holds, after every step."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.cache.page_keys import keys_of
from octavo.messages import AdapterRef, GenerateRequest, PageEvents, PageSnapshot, SamplingParams
from octavo.observe.replica_feed import ReplicaFeed, StepPace
from octavo.observe.step_observer import StepEnd, StepObserver
from octavo.routing.prefix_index import PrefixIndex, page_ids
from tests.recording.recorded import ROOT, Recorded
from tests.schedule.workload import Workload


class Follower(StepObserver):
    """Takes events at random steps, loses some, and asks for a snapshot then."""

    def __init__(self, recorded: Recorded, seed: int) -> None:
        self.scheduler = recorded.loop.scheduler
        self.feed = ReplicaFeed(self.scheduler, 3, 1)
        recorded.loop.observers.add(self.feed)
        recorded.loop.observers.add(self)
        self.index, self.random = PrefixIndex(), random.Random(seed)
        self.index.open(3, 1)
        self.num_checked = self.num_lost = self.most_pages = 0

    def stepped(self, end: StepEnd) -> None:
        r = self.random
        if r.random() < 0.3:
            return
        events = self.feed.take()
        if r.random() < 0.1:
            self.num_lost += 1
            return
        assert self.index.apply(_over_the_wire(events))
        if self.index.incomplete:
            if r.random() < 0.5:
                assert self.index.apply_snapshot(self.feed.snapshot())
            else:
                return
        expected = sorted(page_ids(self.scheduler.cache.findable_keys()).tolist())
        assert sorted(self.index._table.pages_of(3).tolist()) == expected
        self.num_checked += 1
        self.most_pages = max(self.most_pages, len(expected))
        self._check_load()

    def _check_load(self) -> None:
        load, scheduler = self.feed.load(), self.scheduler
        assert load.num_open == len(scheduler.running) + scheduler.num_waiting
        least = sum(max(0, len(each.tokens) - each.computed - 1) for each in scheduler.running)
        most = least + sum(len(each.tokens) for each in [*scheduler.waiting, *scheduler.awaiting_grammar.values()])
        assert least <= load.uncached_tokens <= most
        if scheduler.is_idle:
            assert load.uncached_tokens == 0


def _over_the_wire(events: PageEvents) -> PageEvents:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=PageEvents | PageSnapshot)


def test_an_index_that_follows_holds_what_the_cache_holds(tmp_path: Path) -> None:
    num_checked = num_lost = most_pages = 0
    for seed in range(60):
        recorded = Recorded(
            Workload(seed, has_windows=seed % 3 == 0, has_beams=seed % 4 == 0), tmp_path, False, name=str(seed)
        )
        follower = Follower(recorded, seed)
        recorded.run()
        feed = follower.feed
        assert feed._num_waiting_tokens == 0 and not feed._waiting, f"seed {seed}: work that nobody waits for"
        recorded.loop.close()
        assert follower.scheduler.cache.pool.changes is None, "logged for nobody"
        num_checked, num_lost = num_checked + follower.num_checked, num_lost + follower.num_lost
        most_pages = max(most_pages, follower.most_pages)
    assert num_checked > 500 and num_lost > 50 and most_pages > 10


def test_a_feed_that_begins_late_tells_what_is_there(tmp_path: Path) -> None:
    recorded = Recorded(Workload(4), tmp_path, False)
    params = SamplingParams(max_tokens=1, seed=0)
    prompt = list(range(2 * recorded.load.page_size + 1))
    recorded.load.arrivals = [(0, GenerateRequest("a", prompt, params, []))]
    recorded.run()
    scheduler = recorded.loop.scheduler
    held = scheduler.cache.findable_keys()
    assert held == keys_of(ROOT, prompt, recorded.load.page_size) and held
    feed, index = ReplicaFeed(scheduler, 0, 1), PrefixIndex()
    recorded.loop.observers.add(feed)
    index.open(0, 1)
    before = feed.snapshot()
    assert before.pages == b"" and before.number == 0, "as of the last event"
    index.apply(feed.take())
    assert index.held(page_ids(held)) == {0: len(held)}
    recorded.loop.reset_prefixes()
    index.apply(feed.take())
    assert len(index) == 0
    recorded.loop.close()


def test_work_is_counted_by_what_the_router_expects(tmp_path: Path) -> None:
    recorded = Recorded(Workload(4), tmp_path, False)
    feed = ReplicaFeed(recorded.loop.scheduler, 0, 1)
    recorded.loop.observers.add(feed)
    params = SamplingParams(max_tokens=1, seed=0)
    for origin, name, num_expected in ((2, "a", 6), (2, "b", 99), (0, "c", -5)):
        feed.received(origin)
        recorded.loop.add(GenerateRequest(name, [1] * 10, params, [], origin=origin, num_expected=num_expected))
    feed.received(0)  # and refused
    load = feed.load()
    assert (load.uncached_tokens, load.num_open, load.num_taken) == (4 + 1 + 10, 3, {2: 2, 0: 2})
    recorded.loop.close()


def test_routers_learn_what_the_page_keys_of_an_adapter_start_from(tmp_path: Path) -> None:
    recorded = Recorded(Workload(4), tmp_path, False)
    feed = ReplicaFeed(recorded.loop.scheduler, 0, 1)
    recorded.loop.observers.add(feed)
    params, adapter = SamplingParams(max_tokens=1, seed=0, adapter="digest"), AdapterRef("sql", "/sql", "stamp")
    for name in ("a", "b"):
        recorded.loop.add(GenerateRequest(name, [1] * 10, params, [], adapter=adapter))
    assert _over_the_wire(feed.take()).adapters == {adapter.key: "digest"}
    assert feed.take().adapters == {} and feed.snapshot().adapters == {adapter.key: "digest"}
    recorded.loop.close()


def test_the_pace_is_that_of_full_steps() -> None:
    pace = StepPace()
    assert pace.seconds_per_token(1000) == 0.0
    pace.note(100, 0.02)
    assert pace.seconds_per_token(1000) == pytest.approx(0.0002), "only a mean is known"
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_tokens = int(rng.integers(1, 1000))
        pace.note(num_tokens, 0.01 + 0.0001 * num_tokens)
    assert pace.seconds_per_token(1000) == pytest.approx(0.0001 + 0.01 / 1000, rel=0.02)
