"""Why the prefix cache had no more of a prompt: in journeys, in metrics, and where a prompt differs from the latest of the same API key."""

import random

import pytest

from octavo.messages import GenerateRequest, SamplingParams
from octavo.observe.journeys import recent_prompts
from octavo.observe.journeys.recent_prompts import RecentPrompts
from octavo.observe.journeys.stages import Stage
from octavo.observe.metrics.gauges import EngineState
from tests.observe.test_observe_journal import Engine


def ask(engine: Engine, name: str, prompt: list[int], owner: bytes = b"", **params: int) -> Stage:
    """→ the stage in which its prompt was computed."""
    wishes = SamplingParams(max_tokens=1, seed=1, ignore_eos=True, **params)
    engine.loop.add(GenerateRequest(name, prompt, wishes, [], http_id=f"http-{name}", owner=owner))
    engine.run()
    (track,) = engine.ended[name].tracks
    return next(stage for stage in track.stages if stage.name == "prefill")


def test_a_journey_says_why_and_where() -> None:
    engine = Engine(num_pages=8)
    first = ask(engine, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (first.missed, first.differs_at) == ("new", None)
    second = ask(engine, "b", [1, 2, 3, 4, 5, 60, 7, 8, 9])
    assert (second.missed, second.cached_tokens, second.differs_at, second.differs_from) == ("new", 4, 5, "http-a")
    assert (ask(engine, "c", [1, 2, 3, 4, 5, 6, 7, 8, 30]).missed, ask(engine, "d", [1, 2]).missed) == ("", "short")
    ask(engine, "e", list(range(40, 72)))  # all pages
    evicted = ask(engine, "f", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (evicted.missed, evicted.differs_at) == ("evicted", None)


def test_a_beginning_that_only_a_forgotten_prompt_had_is_not_compared() -> None:
    """The cockpit showed "128 cached, differs at token 7": the eight latest prompts had less in common with it than the cache."""
    engine = Engine(num_pages=200)
    ask(engine, "old", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for number in range(recent_prompts.MAX_COMPARED):
        ask(engine, f"{number}", [1, 20 + number, 3, 4, 5])
    late = ask(engine, "late", [1, 2, 3, 4, 5, 6, 7, 8, 30, 31, 32, 33, 34])
    assert (late.missed, late.cached_tokens, late.differs_at, late.differs_from) == ("new", 8, None, "")
    follow = ask(engine, "follow", [1, 2, 3, 4, 5, 6, 7, 8, 30, 99, 32, 33, 34])
    assert (follow.cached_tokens, follow.differs_at, follow.differs_from) == (8, 9, "http-late")


def test_prompts_of_another_key_are_not_compared() -> None:
    engine = Engine(num_pages=32)
    ask(engine, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9], owner=b"x")
    other = ask(engine, "b", [1, 2, 3, 4, 5, 60, 7, 8, 9], owner=b"y")
    assert other.missed == "new" and other.differs_at is None and other.differs_from == ""
    again = ask(engine, "c", [1, 2, 3, 4, 5, 60, 7, 80, 9], owner=b"y")
    assert (again.differs_at, again.differs_from) == (7, "http-b")


def test_missed_tokens_are_counted_by_reason_and_add_up() -> None:
    engine = Engine(num_pages=8)
    ask(engine, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    ask(engine, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # 8 found
    ask(engine, "c", [1, 2, 3])
    ask(engine, "d", list(range(40, 72)))
    ask(engine, "e", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    lines = engine.control.metrics.text(EngineState()).splitlines()
    found = {
        line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("octavo:prefix_missed_tokens_total")
    }
    assert found == {"new": 41, "tail": 2, "short": 3, "evicted": 9, "window": 0, "needed": 0, "off": 0}
    assert sum(found.values()) == 9 + 10 + 3 + 32 + 9 - 8


@pytest.mark.parametrize("seed", range(20))
def test_the_difference_is_the_first_token_that_no_compared_prompt_has_there(seed: int) -> None:
    dice = random.Random(seed)
    prompts = RecentPrompts()
    kept: list[list[int]] = []
    for number in range(30):
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 40))]
        found = prompts.add(b"", str(number), tokens, compare=True)
        common = [
            next((at for at, (a, b) in enumerate(zip(tokens, old, strict=False)) if a != b), min(len(tokens), len(old)))
            for old in kept
        ]
        best = max(common, default=0)
        if found is None:
            assert best in (0, len(tokens))
        else:
            assert found.at == best and common[int(found.request_id) - (number - len(kept))] == best
        kept = [*kept, tokens][-recent_prompts.MAX_COMPARED :]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_TOKENS", 100)
    monkeypatch.setattr(recent_prompts, "MAX_OWNERS", 3)
    prompts = RecentPrompts()
    for number in range(50):
        prompts.add(bytes([number % 5]), str(number), [number] * (number % 40), compare=False)
        assert prompts._num_bytes == sum(len(each.tokens) for its in prompts._owners.values() for each in its) <= 400
        assert len(prompts._owners) <= 3
    prompts.add(b"x", "large", [1] * 1000, compare=False)
    assert prompts._num_bytes == 0, "one that is too long is not kept"
    prompts.clear()
    assert not prompts._owners
