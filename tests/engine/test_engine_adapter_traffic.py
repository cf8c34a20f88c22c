"""Which adapters are in memory: a budget of bytes, requests that wait in order, and ends of requests that plans in flight still name."""

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from octavo.cache import KVCache
from octavo.engine.adapter_traffic import MAX_HELD, MAX_OVERTAKEN, AdapterTraffic, LetThrough
from octavo.errors import ConfigError, EngineDead, Overloaded
from octavo.messages import Abort, AdapterLoaded, AdapterRef, GenerateRequest, SamplingParams, StepResult
from octavo.observe.step_observer import StepTimes
from octavo.schedule import Scheduler

PARAMS = SamplingParams(max_tokens=3, seed=0)


class Loader:
    """Loads when it is told to: by `finish`."""

    def __init__(self) -> None:
        self.asked: dict[str, Callable[[AdapterLoaded | str | EngineDead], None]] = {}
        self.loaded: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}

    def adapter_itemsize(self) -> int:
        return 1

    def check_adapter(self, ref: AdapterRef) -> int:
        if ref.name == "bad":
            raise ConfigError("it does not fit")
        return self.sizes.get(ref.name, 10)

    def load_adapter(self, ref: AdapterRef, done: Callable[[AdapterLoaded | str | EngineDead], None]) -> None:
        assert ref.name not in self.asked, "asked twice"
        self.asked[ref.name] = done

    def forget_adapters(self, ids: list[str]) -> None:
        assert self.loaded >= Counter(ids)
        self.loaded -= Counter(ids)

    def finish(self, name: str, error: str = "") -> None:
        done = self.asked.pop(name)
        if error:
            return done(error)
        self.loaded[f"id-{name}"] += 1
        done(AdapterLoaded(f"id-{name}", self.sizes.get(name, 10)))


class Engine:
    """A scheduler whose every step is committed at once, unless it is held in flight."""

    def __init__(self, budget: int = 30, max_used: int = 0, max_loaded: int = 0, max_num_seqs: int = 64) -> None:
        self.scheduler = Scheduler(KVCache(400, 4), max_num_seqs, 4096)
        self.loader, self.now = Loader(), 0.0
        self.traffic = AdapterTraffic(
            self.scheduler, self.loader, budget, lambda: self.now, max_used, max_loaded, itemsize=1
        )
        self.count = 0

    def ask(self, adapter: str) -> str:
        self.count += 1
        name = f"r{self.count}"
        ref = AdapterRef(adapter, f"/{adapter}", num_weights=self.loader.sizes.get(adapter, 10)) if adapter else None
        self._add(self.traffic.add(GenerateRequest(name, [1, 2, 3], PARAMS, [], adapter=ref)))
        return name

    def _add(self, released: list[LetThrough]) -> None:
        for request, _ in released:
            if request.adapter is not None:
                assert request.params.adapter == f"id-{request.adapter.name}"
                assert request.params.adapter in self.loader.loaded
            self.scheduler.add(request)

    def take(self) -> list[tuple[str, str]]:
        released, refused = self.traffic.take()
        self._add(released)
        return [(request.id, why) for request, why in refused]

    def load(self, name: str, error: str = "") -> list[tuple[str, str]]:
        self.loader.finish(name, error)
        return self.take()

    def plan(self) -> Callable[[], None]:
        """Make a plan. → its commit."""
        planned = self.scheduler.plan()
        self.traffic.planned(planned, self.now)
        for entering in planned.plan.enters:
            assert not entering.params.adapter or entering.params.adapter in self.loader.loaded

        def commit() -> None:
            if planned.is_empty:
                return
            result = StepResult(planned.plan.step, [7] * sum(planned.plan.samples))
            committed = self.scheduler.commit(planned.plan, result)
            self.traffic.committed(committed, StepTimes(self.now, 0.0))

        return commit

    def step(self) -> None:
        self.plan()()

    def runs(self, name: str) -> bool:
        return self.scheduler.has(name)


def test_a_request_waits_for_its_adapter_alone() -> None:
    engine = Engine()
    first, other, base = engine.ask("a"), engine.ask("b"), engine.ask("")
    assert engine.runs(base) and not engine.runs(first)
    assert [*engine.loader.asked] == ["a", "b"]
    engine.load("b")
    assert engine.runs(other) and not engine.runs(first) and engine.traffic.state().waiting == ("a", "b")
    again = engine.ask("b")  # which is in memory
    assert engine.runs(again)
    engine.load("a")
    assert engine.runs(first)
    assert engine.traffic.state().running == (), "none has a row yet"
    engine.step()
    assert engine.traffic.state().running == ("a", "b") and engine.traffic.state().waiting == ()


def test_an_adapter_runs_while_a_request_with_it_has_a_row() -> None:
    """As vLLM's lora_requests_info: requests that wait in the queue count as waiting, and an adapter may do both."""
    engine = Engine(max_num_seqs=2)
    first, second = engine.ask("a"), engine.ask("a")
    engine.load("a")
    engine.step()
    third, fourth = engine.ask("a"), engine.ask("b")
    engine.load("b")
    engine.step()
    assert all(map(engine.runs, (first, second, third, fourth)))
    assert (engine.traffic.state().running, engine.traffic.state().waiting) == (("a",), ("a", "b"))
    for name in (first, second):
        removed = engine.scheduler.abort(name)
        assert removed is not None
        engine.traffic.removed(Abort(name), removed, 0.0)
    engine.step()
    assert (engine.traffic.state().running, engine.traffic.state().waiting) == (("a", "b"), ())


def test_memory_is_freed_when_no_plan_in_flight_names_it() -> None:
    engine = Engine(budget=10)
    first = engine.ask("a")
    engine.load("a")
    in_flight = engine.plan()
    removed = engine.scheduler.abort(first)
    assert removed is not None
    engine.traffic.removed(Abort(first), removed, 0.0)
    second = engine.ask("b")
    engine.take()
    assert not engine.loader.asked, "a step in flight still reads it"
    in_flight()
    engine.take()
    assert [*engine.loader.asked] == ["b"] and not engine.loader.loaded
    engine.load("b")
    assert engine.runs(second)


def test_the_cheapest_and_least_used_is_dropped() -> None:
    engine = Engine(budget=30)
    for name, seconds, uses in (("a", 1.0, 3), ("b", 1.0, 1), ("c", 9.0, 1)):
        engine.ask(name)
        engine.now += seconds
        engine.load(name)
        for _ in range(uses - 1):
            engine.ask(name)
    for _ in range(4):
        engine.step()
    engine.ask("d")
    assert engine.loader.loaded == {"id-a": 1, "id-c": 1} and [*engine.loader.asked] == ["d"]


def test_what_is_in_use_is_never_dropped_and_waiting_is_bounded() -> None:
    """Requests with the adapter that is in memory pass one that waits, MAX_OVERTAKEN times at most."""
    engine = Engine(budget=10)
    engine.ask("a")
    engine.load("a")
    waiting = engine.ask("b")
    passed = 0
    for _ in range(MAX_OVERTAKEN + 20):
        passed += engine.runs(engine.ask("a"))
    assert passed == MAX_OVERTAKEN and not engine.runs(waiting)
    for _ in range(8):
        engine.step()
        engine.take()
    assert [*engine.loader.asked] == ["b"]
    engine.load("b")
    assert engine.runs(waiting)


def test_limits_of_numbers() -> None:
    engine = Engine(budget=1000, max_used=1)
    first, second = engine.ask("a"), engine.ask("b")
    engine.load("a")
    engine.load("b")
    assert engine.runs(first) and not engine.runs(second)
    for _ in range(4):
        engine.step()
    engine.take()
    assert engine.runs(second)
    engine = Engine(budget=1000, max_loaded=2)
    for name in "abc":
        engine.ask(name)
        if name in engine.loader.asked:
            engine.load(name)
    assert len(engine.loader.loaded) == 2 and not engine.loader.asked


def test_failures_end_the_requests_that_wait_for_it() -> None:
    engine = Engine()
    first, second, other = engine.ask("a"), engine.ask("a"), engine.ask("b")
    assert engine.load("a", "no such file") == [(first, "no such file"), (second, "no such file")]
    engine.load("b")
    assert engine.runs(other) and engine.traffic.num_held == 0
    engine.ask("a")  # it is tried again
    assert "a" in engine.loader.asked
    engine.loader.sizes["huge"] = 31
    huge = engine.ask("huge")
    for _ in range(6):
        engine.step()
        engine.take()
    if "a" in engine.loader.asked:
        engine.load("a", "gone")
    engine.take()
    ((name, why),) = engine.load("huge")
    assert name == huge and "31 bytes; all may take 30 (--lora-memory)" in why


def test_aborts_of_requests_that_wait() -> None:
    engine = Engine(budget=10)
    engine.ask("a")
    engine.load("a")
    waiting = engine.ask("b")
    assert engine.traffic.drop(Abort(waiting)) and not engine.traffic.holds(waiting)
    assert not engine.traffic.drop(Abort(waiting))
    loading = Engine()
    name = loading.ask("a")
    assert loading.traffic.drop(Abort(name))
    loading.load("a")  # which no request wants any more
    assert loading.runs(loading.ask("a"))


def test_loading_ahead_of_requests() -> None:
    engine, told = Engine(budget=10), []
    ref = AdapterRef("a", "/a", num_weights=10)
    engine.traffic.load(ref, told.append)
    assert told == []
    engine.load("a")
    assert told == [""]
    engine.traffic.load(ref, told.append)
    assert told == ["", ""]
    assert engine.runs(engine.ask("a"))
    engine.traffic.load(AdapterRef("b", "/b", num_weights=10), told.append)  # there is no room: it is only checked
    engine.traffic.load(AdapterRef("bad", "/bad", num_weights=10), told.append)
    assert told[2:] == ["", "it does not fit"]


def test_the_number_of_waiting_requests_is_bounded() -> None:
    engine = Engine()
    for _ in range(MAX_HELD):
        engine.ask("a")
    with pytest.raises(Overloaded, match="wait for adapters"):
        engine.ask("a")


def test_random_traffic_ends() -> None:
    """Any order of requests, loads and steps: memory stays within the budget, and every request runs in the end."""
    for seed in range(30):
        rng = random.Random(seed)
        engine = Engine(budget=rng.choice([10, 25, 40]), max_used=rng.choice([0, 1, 3]), max_loaded=rng.choice([0, 3]))
        names = [engine.ask(rng.choice(["", "a", "b", "c", "d", "e"])) for _ in range(5)]
        for _ in range(120):
            action = rng.randrange(4)
            if action == 0 and len(names) < 60:
                names.append(engine.ask(rng.choice(["", "a", "b", "c", "d", "e"])))
            elif action == 1 and engine.loader.asked:
                engine.load(rng.choice([*engine.loader.asked]))
            else:
                engine.step()
                engine.take()
            assert 10 * len(engine.loader.loaded) <= engine.traffic._budget
        for _ in range(400):
            for name in [*engine.loader.asked]:
                engine.load(name)
            engine.step()
            engine.take()
        assert engine.scheduler.is_idle and engine.traffic.num_held == 0, f"seed {seed}"
        assert not engine.traffic._of_request and engine.traffic.state().running == ()


def test_parameters_of_a_request_without_an_adapter() -> None:
    engine = Engine()
    given = GenerateRequest("x", [1], msgspec.structs.replace(PARAMS, adapter="id-a"), [])
    ((request, _),) = engine.traffic.add(given)
    assert request.params.adapter == ""


def test_an_adapter_that_is_larger_than_was_estimated() -> None:
    """It does not stay in memory while there is no room for it, and is read again when there is."""
    engine = Engine(budget=30)
    first, second = engine.ask("a"), engine.ask("b")
    engine.load("a")
    engine.loader.sizes["b"] = 25
    engine.load("b")
    assert engine.runs(first) and not engine.runs(second)
    assert engine.loader.loaded == {"id-a": 1} and not engine.loader.asked
    for _ in range(4):
        engine.step()
    engine.take()
    engine.load("b")
    assert engine.runs(second) and engine.loader.loaded == {"id-b": 1} and engine.traffic.state().num_bytes == 25


def test_a_rank_that_ends_while_it_reads_ends_the_engine() -> None:
    engine = Engine()
    engine.ask("a")
    engine.loader.asked["a"](EngineDead("rank 1 was killed by signal 9"))
    with pytest.raises(EngineDead, match="rank 1"):
        engine.take()


def test_an_adapter_for_which_others_lie_in_the_way() -> None:
    """One more goes each time, and when none is left it cannot be loaded."""
    engine = Engine(budget=100)
    for name in ("a", "b", "c"):
        engine.ask(name)
        engine.load(name)
    for _ in range(4):
        engine.step()
    engine.take()
    waiting = engine.ask("d")
    for num_left in (2, 1):
        engine.loader.asked.pop("d")(AdapterLoaded("", 0))
        engine.take()
        assert len(engine.loader.loaded) == num_left and "d" in engine.loader.asked
    engine.load("d")
    assert engine.runs(waiting) and engine.traffic.state().num_bytes == 20
    alone = Engine(budget=100)
    asked = alone.ask("e")
    alone.loader.asked.pop("e")(AdapterLoaded("", 0))
    assert [(name, "--lora-memory" in why) for name, why in alone.take()] == [(asked, True)]


def test_an_adapter_waits_for_those_that_lie_in_the_way_and_are_in_use() -> None:
    engine = Engine(budget=100)
    first = engine.ask("a")
    engine.load("a")
    second, told = engine.ask("b"), []
    engine.traffic.load(AdapterRef("b", "/b", num_weights=10), told.append)
    engine.loader.asked.pop("b")(AdapterLoaded("", 0))
    engine.take()
    assert engine.runs(first) and not engine.runs(second) and not engine.loader.asked and told == [""]
    for _ in range(4):
        engine.step()
    engine.take()
    engine.load("b")
    assert engine.runs(second) and engine.loader.loaded == {"id-b": 1}


def test_loads_ahead_of_requests_wait_for_their_turn() -> None:
    """Two loads are out at one time: the others begin when one has ended, and each is answered."""
    engine, told = Engine(budget=100), []
    for name in "abcde":
        engine.traffic.load(
            AdapterRef(name, f"/{name}", num_weights=10), lambda why, name=name: told.append((name, why))
        )
    assert [*engine.loader.asked] == ["a", "b"]
    engine.load("a")
    assert [*engine.loader.asked] == ["b", "c"] and told == [("a", "")]
    engine.load("b", "gone")
    engine.load("c")
    engine.load("d")
    engine.load("e")
    assert told == [("a", ""), ("b", "gone"), ("c", ""), ("d", ""), ("e", "")] and not engine.loader.asked


def test_a_load_outlives_a_request_that_wanted_the_same() -> None:
    engine, told = Engine(budget=100), []
    engine.ask("a"), engine.ask("b")
    waiting = engine.ask("c")
    engine.traffic.load(AdapterRef("c", "/c", num_weights=10), told.append)
    assert engine.traffic.drop(Abort(waiting))
    engine.load("a")
    engine.load("c")
    assert told == [""]
