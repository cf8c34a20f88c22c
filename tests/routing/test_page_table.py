"""PageTable against sets: whatever is added and removed, in whatever order, however full the buckets are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.routing.page_table import PageTable, replicas_in

# Few ids, and among them many that share both buckets of a small table: these fill up, and the rest goes to the stash.
CROWDED = [(high << 40) | (low << 8) | 3 for high in range(1, 5) for low in range(12)]
PAGES = st.sampled_from([*range(1, 30), *CROWDED, 2**64 - 1])
STEPS = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "remove all"]),
    st.integers(0, 130),
    st.lists(PAGES, max_size=40),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=25), st.sampled_from([0, 5, 4096]))
def test_it_equals_sets(steps: list[tuple[str, int, list[int]]], max_unused_sets: int) -> None:
    table, model = PageTable(0, max_unused_sets), dict[int, set[int]]()
    for verb, replica, pages in steps:
        held, ids = model.setdefault(replica, set()), np.array(pages, np.uint64)
        if verb == "add":
            assert table.add(ids, replica) == len(set(pages) - held)
            held |= set(pages)
        elif verb == "remove":
            assert table.remove(ids, replica) == len(set(pages) & held)
            held -= set(pages)
        else:
            table.remove_all(replica)
            held.clear()
        everything = sorted(set().union(*model.values()))
        assert len(table) == len(everything)
        asked = np.array([*everything, 777, 2**63], np.uint64)
        found = [set(replicas_in(mask)) for mask in table.masks_of(asked)]
        assert found == [{one for one, its in model.items() if page in its} for page in asked.tolist()]
        assert set(table.pages_of(replica).tolist()) == held


def test_it_grows_and_keeps_everything() -> None:
    table, rng = PageTable(), np.random.default_rng(1)
    pages = rng.integers(1, 2**64, 50_000, np.uint64)
    for at in range(0, len(pages), 777):
        table.add(pages[at : at + 777], at % 7)
    assert len(table) == 50_000
    assert table.masks_of(pages) == [1 << (at // 777 * 777 % 7) for at in range(50_000)]
    assert table.nbytes <= 50_000 * 12 * 4


def test_sets_that_are_no_longer_used_are_dropped() -> None:
    table, page = PageTable(0, 10), np.array([5], np.uint64)
    for replica in range(200):
        table.add(page, replica)
    assert len(table._sets) <= 30
    assert table.masks_of(page) == [2**200 - 1]
