"""An observer that raises is dropped: the engine and the other observers go on as if it had never been there."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.step_heartbeat import StepHeartbeat
from octavo.observe.step_observer import StepObserver
from octavo.recording.format import read
from octavo.replay.replay import Replay
from tests.recording.recorded import Recorded
from tests.schedule.workload import Workload
from tests.server.running import Served, ask, engine

pytestmark = pytest.mark.drops_observers

EVENTS = [
    name for name in vars(StepObserver) if callable(getattr(StepObserver, name)) and name not in ("__init__", "dropped")
]


class Faulty(StepObserver):
    """Raises when it is called; a subclass has one method that does."""

    num_calls = num_drops = 0

    def dropped(self) -> None:
        self.num_drops += 1

    def hear(self, *event: Any) -> bool:
        self.num_calls += 1
        raise ZeroDivisionError("a fault of this observer")


class Log(StepObserver):
    """The names of all events."""

    def __init__(self) -> None:
        self.heard: list[str] = []


for _event in EVENTS:
    setattr(Log, _event, lambda self, *event, name=_event: bool(self.heard.append(name)))


def load_and_limit(recorded: Recorded) -> None:
    """What a tier and scarce memory cause, twice."""
    cache, observers = recorded.loop.scheduler.cache, recorded.loop.observers
    for ticket in range(2):
        assert cache.begin_load(ticket, [], 1) is not None
        observers.load_began(ticket, [], 1)
        cache.end_load(ticket, 1, [])
        observers.load_ended(ticket, 1, [])
        observers.waited_for_load("none", 0.0, 0)
        observers.waited_for_adapter("none", 0.0)
        cache.hold([])
        cache.let_go([])
        observers.prefixes_held([], [])
        cache.pool.limit_touched(cache.pool.num_pages)
        observers.idle_limited(cache.pool.num_pages)


def run(folder: Path, *observers: StepObserver) -> Recorded:
    recorded = Recorded(Workload(70, has_beams=True, has_grammars=True, has_limit=True), folder, False)
    for observer in observers:
        recorded.loop.observers.add(observer)
    load_and_limit(recorded)
    recorded.run()
    recorded.loop.close()
    return recorded


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_raises_is_dropped(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, expected = Log(), Log()
    (tmp_path / "expected").mkdir()
    (tmp_path / "found").mkdir()
    undisturbed = run(tmp_path / "expected", expected)
    assert expected.heard.count(event) > 1 or event == "closed", "the load does not cause this event often enough"
    bad, after = type("Faulty", (Faulty,), {event: Faulty.hear})(), Log()
    with caplog.at_level(logging.ERROR):
        disturbed = run(tmp_path / "found", before, bad, after)
    assert bad.num_calls == 1, "called again after it had raised"
    assert bad.num_drops == 1
    assert before.heard == after.heard == expected.heard
    assert disturbed.executor.tokens == undisturbed.executor.tokens
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "the observer Faulty failed and is dropped; serving goes on without it"
    ]
    assert errors[0].exc_info is not None and errors[0].exc_info[0] is ZeroDivisionError


def test_without_its_heartbeat_an_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would take it for one that hangs."""
    monkeypatch.setattr(StepHeartbeat, "stepped", Faulty.hear)
    monkeypatch.setattr(StepHeartbeat, "num_calls", 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path)


def test_a_recording_ends_where_its_recorder_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before can be replayed; the cache no longer keeps the keys that nothing takes away."""
    recorded = Recorded(Workload(70, has_beams=True, has_grammars=True, has_limit=True), tmp_path, False)
    recorded.run(most_turns=30)
    monkeypatch.setattr(type(recorded.recorder), "_outcome", Faulty.hear)
    monkeypatch.setattr(type(recorded.recorder), "num_calls", 0, raising=False)
    recorded.run()
    assert recorded.recorder not in recorded.loop.observers
    assert recorded.loop.scheduler.cache.keys_made is None
    recorded.recorder._thread.join(10)
    assert not recorded.recorder._thread.is_alive()
    replay = Replay(read(tmp_path))
    for _ in replay.follow():
        pass
    assert 0 < replay.num_same == replay.num_steps < recorded.loop.scheduler.num_steps


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served(engine())
    yield server
    await server.http.aclose()
    server.client.close()


async def test_a_server_answers_without_journeys_where_the_journal_is_dropped(served: Served) -> None:
    engine = served.client._engine
    journal = engine.control.journal
    journal._tally = None  # type: ignore[assignment]  # the next commit makes it raise
    for _ in range(2):
        assert (await served.http.post("/v1/completions", json=ask())).status_code == 200
    assert journal not in engine.loop.observers
    assert (await served.http.get("/v1/requests")).status_code == 200
    assert (await served.http.get("/metrics")).status_code == 200
