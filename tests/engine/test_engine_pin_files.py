"""Pins that outlive their engine: held again by the next, computed again one at a time, and left alone where they may be why engines end."""

import time
from pathlib import Path

import pytest

from octavo.cache import KVCache
from octavo.engine.pin_files import MAX_TRIES, PinFiles, SavedPin
from octavo.engine.prefix_holds import MAX_SESSIONS, NO_ORIGIN, PrefixHolds
from octavo.messages import HoldPrefix, ReleasePrefix
from octavo.observe.step_observer import Observers

PROMPT = list(range(1, 101))  # six pages of 16 tokens


def engine(folder: Path, now: float = 100.0, num_pages: int = 64) -> PrefixHolds:
    """The holds of a new engine, which has another root of page keys than the last."""
    cache = KVCache(num_pages, 16, root=b"root %f" % now)
    holds = PrefixHolds(cache, Observers([], lambda: now), 1024, lambda: now, PinFiles(folder))
    holds.restore()
    return holds


def pin(holds: PrefixHolds, name: str, prompt: list[int] = PROMPT, **more) -> None:
    reply = holds.pin(HoldPrefix(0, name, prompt, **{"max_bytes": 2**30} | more))
    assert not reply.error, reply.error


def names(holds: PrefixHolds) -> list[str]:
    return [each.name for each in holds.pins(None)]


def test_the_next_engine_holds_what_was_pinned_and_computes_it_one_at_a_time(tmp_path):
    holds = engine(tmp_path / "pins")
    pin(holds, "a", owner=b"k1")
    pin(holds, "b", PROMPT[:40], owner=b"k2", seconds=50.0, space="+salt")
    pin(holds, "c")
    holds.unpin(ReleasePrefix(0, "c"))
    assert holds.next_to_warm(1000) is None, "the request that pins them has them computed"

    holds = engine(tmp_path / "pins", 120.0)
    assert names(holds) == ["a", "b"]
    assert [(each.tokens, each.cached_tokens, each.seconds_left) for each in holds.pins(None)] == [
        (96, 0, None),
        (32, 0, 30.0),
    ], "nothing is in the cache yet, and that is what it says"
    first = holds.next_to_warm(1000)
    assert first is not None and (first.prompt_ids, first.owner, first.origin) == (PROMPT, b"k1", NO_ORIGIN)
    assert holds.next_to_warm(1000) is None, "one at a time"
    holds.warmed()
    second = holds.next_to_warm(1000)
    assert second is not None and second.params.prefix_space == "+salt" and second.id != first.id
    holds.warmed()
    assert holds.next_to_warm(1000) is None

    assert names(engine(tmp_path / "pins", 151.0)) == ["a"], "the time of b is over"
    assert names(engine(tmp_path / "pins", 160.0)) == ["a"]


def test_a_prefix_that_engines_end_with_is_not_computed_again(tmp_path):
    pin(engine(tmp_path / "pins"), "deadly")
    for number in range(MAX_TRIES):
        holds = engine(tmp_path / "pins", 101.0 + number)
        assert holds.next_to_warm(1000) is not None  # … and this engine ends
    holds = engine(tmp_path / "pins", 110.0)
    assert names(holds) == ["deadly"] and holds.next_to_warm(1000) is None
    pin(holds, "deadly", PROMPT[:50])  # the client that pins it computes it, and the count begins anew
    assert engine(tmp_path / "pins", 111.0).next_to_warm(1000) is not None


def test_what_is_unpinned_while_it_is_computed_stays_unpinned(tmp_path):
    pin(engine(tmp_path / "pins"), "a")
    holds = engine(tmp_path / "pins", 101.0)
    assert holds.next_to_warm(1000) is not None
    holds.unpin(ReleasePrefix(0, "a"))
    holds.warmed()
    assert names(engine(tmp_path / "pins", 102.0)) == []


def test_a_smaller_store_keeps_what_fits(tmp_path, caplog):
    holds = engine(tmp_path / "pins")
    pin(holds, "a")
    pin(holds, "b", [9, *PROMPT])
    holds = engine(tmp_path / "pins", 101.0, num_pages=16)
    assert names(holds) == ["a"] and "'b' is not pinned any more" in caplog.text
    assert names(engine(tmp_path / "pins", 102.0)) == ["a"]


def test_prompts_that_no_longer_fit_the_context_are_not_computed(tmp_path):
    pin(engine(tmp_path / "pins"), "a")
    assert engine(tmp_path / "pins", 101.0).next_to_warm(100) is None
    assert engine(tmp_path / "pins", 101.0).next_to_warm(101) is not None


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 100, b"torn"])
def test_a_file_that_cannot_be_read_is_left_out(tmp_path, content, caplog):
    holds = engine(tmp_path / "pins")
    pin(holds, "a")
    (tmp_path / "pins" / "ffff").write_bytes(content)
    assert names(engine(tmp_path / "pins", 101.0)) == ["a"] and "could not be read" in caplog.text


def test_a_folder_that_refuses_costs_no_pin(tmp_path, caplog):
    (tmp_path / "pins").write_text("a file where the folder should be")
    holds = engine(tmp_path / "pins")
    pin(holds, "a")
    assert names(holds) == ["a"] and "would be lost with this engine" in caplog.text
    holds.unpin(ReleasePrefix(0, "a"))


def test_files_are_for_their_owner_alone(tmp_path):
    pin(engine(tmp_path / "pins"), "a")
    (file,) = (tmp_path / "pins").iterdir()
    assert (tmp_path / "pins").stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    assert PinFiles(tmp_path / "pins").load() == [SavedPin(HoldPrefix(0, "a", PROMPT, max_bytes=2**30), float("inf"))]


def test_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    holds = engine(tmp_path)
    pin(holds, "a")
    pin(holds, "b")
    first, _ = sorted(tmp_path.iterdir())
    content = first.read_bytes()
    for wrong in (content.replace(b"\xa4name\xa1", b"\xa4name\xa1\xff"), content[:20], b"\x91" * 5000, b""):
        first.write_bytes(wrong)
        assert len(names(engine(tmp_path, now=101.0))) == 1


def test_many_holds_that_end_at_once_take_no_time() -> None:
    """As many conversations as there can be: their time is over, or a long one takes their place. Others' tokens wait for it."""
    now = 100.0
    holds = PrefixHolds(KVCache(3 * MAX_SESSIONS, 16, root=b"r"), Observers([], lambda: now), 1024, lambda: now)
    for is_over in (True, False):
        for number in range(MAX_SESSIONS):
            holds._put(holds._sessions, (b"", f"{number}", b""), [number.to_bytes(16)], now + 300)
        began = time.process_time()
        if is_over:
            now += 301
            assert holds.is_due
            holds.take()
            assert not holds.is_due and holds.state().num_holds["session"] == 0
        else:
            keys = [number.to_bytes(16) for number in range(MAX_SESSIONS, MAX_SESSIONS + holds.max_pages - 100)]
            holds._put(holds._sessions, (b"", "long", b""), keys, now + 300)
            assert holds.state().num_holds["session"] == 101
        assert time.process_time() - began < 0.08
