"""Prefixes whose pages are evicted last, under the real loop: conversations for a time after their last turn, pins within their budget."""

import msgspec
import pytest

from octavo.cache import audit
from octavo.engine import prefix_holds
from octavo.engine.build import Engine
from octavo.engine.prefix_holds import PrefixHolds
from octavo.messages import Abort, GenerateRequest, HoldPrefix, PrefixReply, ReadPrefixes, ReleasePrefix, SamplingParams
from tests.server.running import engine as make_engine


class Clock:
    """Time that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock()


def build(clock: Clock, num_pages: int = 64) -> tuple[Engine, PrefixHolds]:
    engine = make_engine(num_pages, seconds=0.0)
    holds = engine.loop.holds
    assert holds is not None
    holds._clock = clock
    return engine, holds


def prompt(seed: int, num_pages: int) -> list[int]:
    return [(seed * 7 + at) % 250 + 1 for at in range(16 * num_pages + 1)]


def ask(engine: Engine, name: str, ids: list[int], seconds: float = 0.0, session: str = "", owner: bytes = b"") -> int:
    """A whole request. → prompt tokens that it found."""
    params = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    engine.loop.add(GenerateRequest(name, ids, params, [], session=session, retain_seconds=seconds, owner=owner))
    found = 0
    while engine.loop.has_work:
        for delta in engine.loop.step():
            if delta.finish is not None:
                found = delta.finish.num_cached_tokens
    assert audit(engine.loop.scheduler.cache, is_idle=True) == []
    return found


def fill(engine: Engine, first: int, num_requests: int = 12) -> None:
    """Others that take all pages, several times."""
    for number in range(first, first + num_requests):
        ask(engine, f"other {number}", [number, *prompt(number, 15)])


def test_a_conversation_keeps_its_pages_for_its_time(clock: Clock) -> None:
    engine, holds = build(clock)
    ask(engine, "a", prompt(1, 4), seconds=300.0, session="s")
    fill(engine, 100)
    assert ask(engine, "b", prompt(1, 4)) == 64
    clock.now += 301.0
    fill(engine, 120)
    assert ask(engine, "c", prompt(1, 4)) == 0 and not engine.loop.scheduler.cache.pool.cached.keep
    assert holds.state().num_holds == {"session": 0, "pin": 0}


def test_without_a_wish_they_are_evicted(clock: Clock) -> None:
    engine, _ = build(clock)
    ask(engine, "a", prompt(1, 4))
    fill(engine, 100)
    assert ask(engine, "b", prompt(1, 4)) == 0


@pytest.mark.parametrize("session", ["s", ""])
def test_the_next_turn_takes_the_place_of_the_last(clock: Clock, session: str) -> None:
    engine, holds = build(clock)
    ids = prompt(1, 2)
    for turn in range(4):
        ask(engine, f"a{turn}", ids, seconds=100.0, session=session)
        ids = [*ids, *prompt(50 + turn, 1)]
        clock.now += 60.0
    holds.take()
    assert holds.state().num_holds["session"] == 1
    fill(engine, 100)
    assert ask(engine, "last", ids) >= 16 * 4
    clock.now += 101.0
    holds.take()
    assert not engine.loop.scheduler.cache.pool.cached.keep


def test_a_request_that_its_client_ends_counts_as_a_turn(clock: Clock) -> None:
    engine, holds = build(clock)
    params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
    engine.loop.add(GenerateRequest("a", prompt(1, 3), params, [], retain_seconds=60.0))
    for _ in range(3):
        engine.loop.step()
    engine.loop.abort(Abort("a", reason="stop"))
    holds.take()
    assert holds.state().num_holds["session"] == 1
    fill(engine, 100)
    assert ask(engine, "b", prompt(1, 3)) == 48


def test_at_most_half_of_the_pages_are_held_and_the_next_to_end_gives_way(clock: Clock) -> None:
    engine, holds = build(clock)
    for number in range(6):
        ask(engine, f"a{number}", [number + 1, *prompt(number, 8)], seconds=100.0 + number, session=f"s{number}")
    holds.take()
    state = holds.state()
    assert state.num_holds["session"] == 4 and state.num_dropped == 2
    assert len(engine.loop.scheduler.cache.pool.cached.keep) <= holds.max_pages == 32
    assert ask(engine, "more", [9, *prompt(9, 40)], seconds=100.0) == 0, "too long to be held, and served"
    holds.take()
    assert holds.state().num_holds["session"] <= 4


def reply(engine: Engine, control: HoldPrefix | ReleasePrefix | ReadPrefixes) -> PrefixReply:
    return msgspec.json.decode(engine.control.reply(control), type=PrefixReply)


def test_a_pin_stays_until_it_is_released(clock: Clock) -> None:
    engine, holds = build(clock)
    page_bytes = engine.report.page_bytes
    ids = prompt(1, 4)
    pinned = reply(engine, HoldPrefix(0, "system", ids))
    assert pinned.error == "" and pinned.pinned[0].tokens == 64 and pinned.pinned[0].cached_tokens == 0
    ask(engine, "warm", ids)
    clock.now += 10**6
    fill(engine, 100)
    (pin,) = reply(engine, ReadPrefixes(0)).pinned
    assert (pin.name, pin.cached_tokens, pin.bytes, pin.seconds_left) == ("system", 64, 4 * page_bytes, None)
    assert holds.state().num_bytes == {"session": 0, "pin": 4 * page_bytes}
    assert reply(engine, ReleasePrefix(0, "system")).pinned == []
    fill(engine, 120)
    assert ask(engine, "b", ids) == 0
    assert "no prefix is pinned under the name 'system'" in reply(engine, ReleasePrefix(0, "system")).error


def test_a_pin_ends_by_itself(clock: Clock) -> None:
    engine, _ = build(clock)
    assert reply(engine, HoldPrefix(0, "p", prompt(1, 2), seconds=60.0)).pinned[0].seconds_left == 60.0
    clock.now += 61.0
    engine.control.rest()
    assert reply(engine, ReadPrefixes(0)).pinned == [] and not engine.loop.scheduler.cache.pool.cached.keep


def test_a_key_pins_no_more_than_its_budget_and_sees_its_own(clock: Clock) -> None:
    engine, _ = build(clock)
    page_bytes = engine.report.page_bytes

    def pin(name: str, seed: int, num_pages: int, owner: bytes) -> PrefixReply:
        return reply(engine, HoldPrefix(0, name, prompt(seed, num_pages), owner, max_bytes=4 * page_bytes))

    assert pin("a", 1, 3, b"x").error == ""
    refused = pin("b", 2, 2, b"x")
    assert f"takes {2 * page_bytes} bytes" in refused.error and f"pin {page_bytes} more" in refused.error
    assert pin("a", 2, 4, b"x").error == "", "a pin of the same name is replaced, and its pages are free for it"
    assert pin("b", 3, 4, b"y").error == ""
    assert [each.name for each in reply(engine, ReadPrefixes(0, b"x")).pinned] == ["a"]
    assert [each.name for each in reply(engine, ReadPrefixes(0)).pinned] == ["a", "b"]
    assert reply(engine, ReadPrefixes(0)).owners == [b"x", b"y"]
    assert reply(engine, ReleasePrefix(0, "b", b"x")).error, "another key's pin"


def test_pins_of_all_keys_leave_half_of_the_store(clock: Clock) -> None:
    engine, _ = build(clock)
    for number in range(4):
        ids = [number + 1, *prompt(number, 8)][:-1]
        assert reply(engine, HoldPrefix(0, "p", ids, bytes([number]), max_bytes=10**9)).error == ""
    assert reply(engine, HoldPrefix(0, "p", prompt(9, 1), b"z", max_bytes=10**9)).error
    assert ask(engine, "long", prompt(20, 60)) == 0, "pinned pages give way to a request that needs them"


def test_the_number_of_pins_is_limited(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_holds, "MAX_PINS", 2)
    engine, _ = build(clock)
    names = [reply(engine, HoldPrefix(0, name, prompt(1, 1))).error for name in ("a", "b", "c", "a")]
    assert names[:2] == ["", ""] and "unpin one" in names[2] and names[3] == ""
