"""PrefixIndex against sets: events that are lost, repeated or of a fenced epoch, snapshots, expectations."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import PageEvents, PageSnapshot, ReplicaLoad
from octavo.routing.prefix_index import PrefixIndex, page_ids

NUM_REPLICAS = 4
PAGES = st.sampled_from([0, *range(2, 21)])  # 0 becomes 1 in the index, so 1 is left out


def encoded(pages: set[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in sorted(pages))


@dataclass
class Replica:
    """A replica, and what a router that hears some of its events has to believe."""

    number: int
    epoch: int = 0
    sent: int = 0
    pages: set[int] = field(default_factory=set)  # really
    believed: set[int] = field(default_factory=set)
    heard: int = 0
    is_complete: bool = True
    last: PageEvents | None = None

    def change(self, stored: set[int], evicted: set[int]) -> PageEvents:
        stored, evicted = stored - self.pages, (evicted & self.pages) - stored
        self.pages = (self.pages | stored) - evicted
        self.sent += 1
        load = ReplicaLoad()
        self.last = PageEvents(self.number, self.epoch, self.sent, encoded(stored), encoded(evicted), load)
        return self.last

    def restart(self) -> None:
        self.epoch, self.sent, self.heard, self.is_complete = self.epoch + 1, 0, 0, True
        self.pages, self.believed = set(), set()


STEPS = st.tuples(
    st.sampled_from(["hear", "hear", "hear", "lose", "repeat", "snapshot", "restart", "fenced"]),
    st.integers(0, NUM_REPLICAS - 1),
    st.sets(PAGES, max_size=8),
    st.sets(PAGES, max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40), st.lists(PAGES, min_size=1, max_size=6, unique=True))
def test_it_equals_sets(steps: list[tuple[str, int, set[int], set[int]]], prompt: list[int]) -> None:
    index = PrefixIndex()
    replicas = [Replica(number) for number in range(NUM_REPLICAS)]
    for replica in replicas:
        index.open(replica.number, 0)
    for verb, number, stored, evicted in steps:
        replica = replicas[number]
        match verb:
            case "hear" | "lose":
                events = replica.change(stored, evicted)
                if verb == "hear":
                    assert index.apply(events)
                    replica.is_complete &= replica.heard == replica.sent - 1
                    replica.heard = replica.sent
                    told = {page for page in range(21) if page.to_bytes(8, "little") in _pieces(events.evicted)}
                    replica.believed -= told
                    replica.believed |= {
                        page for page in range(21) if page.to_bytes(8, "little") in _pieces(events.stored)
                    }
            case "repeat":
                if replica.last is not None and replica.last.number <= replica.heard:
                    assert not index.apply(replica.last)
            case "snapshot":
                snapshot = PageSnapshot(number, replica.epoch, replica.sent, encoded(replica.pages), ReplicaLoad())
                assert index.apply_snapshot(snapshot)
                replica.believed, replica.heard, replica.is_complete = set(replica.pages), replica.sent, True
            case "restart":
                replica.restart()
                replica.last = None
                index.open(number, replica.epoch)
            case "fenced":
                old = PageEvents(number, replica.epoch - 1, replica.heard + 1, encoded(stored), b"", ReplicaLoad())
                assert not index.apply(old)
                assert not index.apply_snapshot(
                    PageSnapshot(number, replica.epoch + 1, 99, encoded(stored), ReplicaLoad())
                )
        for each in replicas:
            assert index.num_pages(each.number) == len({max(page, 1) for page in each.believed})
        assert sorted(index.incomplete) == [each.number for each in replicas if not each.is_complete]
        assert not any(
            each.is_complete and each.heard == each.sent and each.believed != each.pages for each in replicas
        )
        assert index.held(page_ids(encoded_in_order(prompt))) == expected_depths(replicas, prompt)


def _pieces(data: bytes) -> set[bytes]:
    return {data[at : at + 8] for at in range(0, len(data), 8)}


def encoded_in_order(pages: list[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in pages)


def expected_depths(replicas: list[Replica], prompt: list[int]) -> dict[int, int]:
    depths = {}
    for replica in replicas:
        believed = {max(page, 1) for page in replica.believed}
        depth = next((at for at, page in enumerate(prompt) if max(page, 1) not in believed), len(prompt))
        if depth:
            depths[replica.number] = depth
    return depths


def test_a_long_prompt_is_matched_beyond_the_first_look() -> None:
    index, pages = PrefixIndex(), np.arange(1, 1001, dtype=np.uint64)
    for replica, count in enumerate([0, 63, 64, 65, 700, 1000]):
        index.open(replica, 1)
        index.apply(PageEvents(replica, 1, 1, pages[:count].tobytes(), b"", ReplicaLoad()))
    assert index.held(pages) == {1: 63, 2: 64, 3: 65, 4: 700, 5: 1000}
    assert index.held(pages[:0]) == {}


def test_expected_pages_count_until_they_are_settled() -> None:
    index, pages = PrefixIndex(), np.arange(1, 11, dtype=np.uint64)
    for replica in range(2):
        index.open(replica, 1)
    index.expect("first", pages, 1, 0)
    assert index.held(pages) == {1: 10}
    index.expect("second", pages, 1, 10)
    index.expect("elsewhere", pages[:5], 0, 0)
    assert index.held(pages) == {0: 5, 1: 10}
    index.settle("second")
    assert index.held(pages) == {0: 5, 1: 10}, "the first still computes them"
    index.apply(PageEvents(1, 1, 1, pages[:7].tobytes(), b"", ReplicaLoad()))
    index.settle("first")
    index.settle("first")
    assert index.held(pages) == {0: 5, 1: 7}, "what was reported stays"
    index.close(0)
    assert index.held(pages) == {1: 7} and index.num_expected == 0


def test_a_lost_index_is_complete_again_after_snapshots() -> None:
    pages = np.random.default_rng(3).integers(1, 2**64, (5, 2000), np.uint64)
    index = PrefixIndex()
    for replica in range(5):
        index.open(replica, 4)
        assert index.apply(PageEvents(replica, 4, 17, b"", b"", ReplicaLoad()))
    assert index.incomplete == [0, 1, 2, 3, 4]
    for replica in range(5):
        index.apply_snapshot(PageSnapshot(replica, 4, 17, pages[replica].tobytes(), ReplicaLoad()))
    assert index.incomplete == []
    assert [index.held(each) for each in pages] == [{replica: 2000} for replica in range(5)]
