"""Every target of the fuzzer works: its seeds are parsed, and some are taken. A broken target would find nothing."""

import pytest

from benchmarks.fuzz.__main__ import TARGETS


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
