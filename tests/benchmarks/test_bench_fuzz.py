"""Every target of the fuzzer works: its seeds are parsed, and some are taken. A broken target would find nothing."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.fuzz.__main__ import TARGETS


@pytest.fixture(autouse=True)
def close_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A target keeps its event loop for as long as its process."""
    made: list[asyncio.AbstractEventLoop] = []
    new = asyncio.new_event_loop

    def note() -> asyncio.AbstractEventLoop:
        made.append(new())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", note)
    yield
    for loop in made:
        loop.close()
    if made:
        asyncio.set_event_loop(None)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_parsed(name: str) -> None:
    target = TARGETS[name]()
    num_taken = 0
    for seed in target.seeds:
        try:
            target.run(seed)
        except target.refusals:
            continue
        num_taken += 1
    assert num_taken, f"{len(target.seeds)} seeds, all refused"
