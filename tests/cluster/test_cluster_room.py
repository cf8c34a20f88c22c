"""Where a replica fits: cores by the smallest node, nodes by the fewest replicas, and a line that says what is missing."""

import pytest

from octavo.cluster.host import versions
from octavo.cluster.messages import HostPlace, Placed
from octavo.cluster.placer import _check_versions, places_of
from octavo.cluster.relay import words_of
from octavo.cluster.room import NodeRoom, Wish, best_node, could_fit, neighbours, shortage, wish_of
from octavo.errors import ConfigError


def node(
    name: str, cores: float = 0, free: float | None = None, gpus: float = 0, free_gpus: float | None = None
) -> NodeRoom:
    total = {"CPU": cores, "GPU": gpus}
    return NodeRoom(
        name,
        f"10.0.0.{name}",
        total,
        {"CPU": cores if free is None else free, "GPU": gpus if free_gpus is None else free_gpus},
    )


def test_cores_are_those_of_the_smallest_node_divided_by_its_ranks() -> None:
    nodes = [node("head"), node("1", 8), node("2", 16)]
    assert wish_of(1, "cpu", 0, 2, nodes) == Wish(1, "CPU", 8)
    assert wish_of(1, "cpu", 0, 3, nodes) == Wish(1, "CPU", 4)
    assert wish_of(2, "auto", 0, 2, nodes) == Wish(2, "CPU", 4)
    assert wish_of(4, "cpu", 0, 8, nodes) == Wish(4, "CPU", 1)  # never fewer than one
    assert wish_of(1, "cpu", 3, 2, nodes) == Wish(1, "CPU", 3)
    assert wish_of(1, "cpu", 0, 2, []) == Wish(1, "CPU", 1)


def test_a_gpu_for_each_rank_where_there_are_gpus() -> None:
    nodes = [node("1", 8, gpus=2)]
    assert wish_of(2, "auto", 0, 1, nodes) == Wish(2, "GPU", 1)
    assert wish_of(2, "cpu", 0, 1, nodes).resource == "CPU"
    assert wish_of(2, "cuda", 0, 1, [node("1", 8)]).resource == "GPU"


def test_replicas_are_spread_and_ranks_are_kept_together() -> None:
    nodes = [node("1", 4), node("2", 4), node("3", 8, free=2)]
    one = Wish(1, "CPU", 2)
    assert best_node(one, nodes, {}).id == "1"
    assert best_node(one, nodes, {"1": 1}).id == "2"
    assert best_node(one, nodes, {"1": 1, "2": 1}).id == "3"
    assert best_node(Wish(2, "CPU", 2), nodes, {"1": 1}).id == "2"
    assert best_node(Wish(4, "CPU", 2), nodes, {}) is None  # over several nodes


def test_what_is_missing_is_said() -> None:
    nodes = [node("head"), node("1", 4, free=1), node("2", 2)]
    wish = Wish(4, "CPU", 2)
    assert not could_fit(wish, nodes) and could_fit(Wish(3, "CPU", 2), nodes)
    assert shortage(wish, nodes) == (
        "a replica needs 2 cores for each of its 4 ranks, and the cluster's free cores are: 10.0.0.1 (1) 1 of 4; 10.0.0.2 (2) 2 of 2"
    )
    assert shortage(Wish(1, "GPU", 1), []) == "a replica needs 1 GPU, and the cluster's free GPUs are: none"


def test_neighbours_share_a_nodes_memory() -> None:
    nodes = [node("head"), node("1", 8), node("2", 0, gpus=4)]
    assert [neighbours(1, count, nodes) for count in (1, 2, 3, 5)] == [1, 1, 2, 3]


def facts(name: str, gpus: list[str], **changed: str) -> dict:
    return {"node": name, "address": f"10.0.0.{name}", "name": "m", "gpus": gpus, "versions": versions() | changed}


def test_a_rank_sees_the_gpus_of_its_replica_on_its_node() -> None:
    places = places_of([facts("1", ["3"]), facts("1", ["5"]), facts("2", ["0"])])
    assert [(each.node, each.local_rank, each.num_local_ranks, each.gpus) for each in places] == [
        ("1", 0, 2, ["3", "5"]),
        ("1", 1, 2, ["3", "5"]),
        ("2", 0, 1, ["0"]),
    ]
    assert words_of(Placed("h", places, 0)) == "node m (10.0.0.1, 1): 2 ranks, node m (10.0.0.2, 2): 1 rank"


def test_a_place_in_words() -> None:
    place = HostPlace("abcdef0123", "10.0.0.7", "box", 0, 1)
    assert words_of(Placed("h", [place], 4)) == "node box (10.0.0.7, abcdef01), 4 threads"


@pytest.mark.parametrize("name", ["octavo", "torch", "python"])
def test_nodes_with_other_versions_are_refused(name: str) -> None:
    _check_versions([facts("1", [])])
    with pytest.raises(ConfigError, match=rf"node m \(10.0.0.2\) has {name} 0\.1, and here is .* install the same"):
        _check_versions([facts("1", []), facts("2", [], **{name: "0.1"})])
