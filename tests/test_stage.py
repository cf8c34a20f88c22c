"""How layers are divided over stages."""

import random
from itertools import combinations

import pytest

from octavo.errors import ConfigError
from octavo.spec import PageLayout
from octavo.stage import check_stages, even_split, in_words, read_split, split, stage_of


def cost_of(starts: list[int], costs: list[float], before: float, after: float) -> float:
    ends = [*starts[1:], len(costs)]
    stages = [sum(costs[first:end]) for first, end in zip(starts, ends, strict=True)]
    stages[0] += before
    stages[-1] += after
    return max(stages)


def test_the_most_expensive_stage_is_as_cheap_as_it_can_be() -> None:
    rng = random.Random(1)
    for _ in range(200):
        costs = [rng.choice([1.0, 2.0, 3.5]) for _ in range(rng.randint(1, 9))]
        count, before, after = rng.randint(1, len(costs)), rng.choice([0.0, 1.0]), rng.choice([0.0, 2.0, 8.0])
        every = [[0, *others] for others in combinations(range(1, len(costs)), count - 1)]
        best = min(cost_of(starts, costs, before, after) for starts in every)
        found = split(costs, before, after, count)
        assert len(found) == count and sorted(set(found)) == found
        assert cost_of(found, costs, before, after) == pytest.approx(best)


def test_a_large_head_takes_the_place_of_layers() -> None:
    assert split([1.0] * 30, 0.0, 8.0, 2) == [0, 19]
    assert split([1.0] * 30, 0.0, 0.0, 3) == [0, 10, 20]
    assert in_words([0, 19], 30) == "19 + 11 layers"
    assert even_split(4, 10) == [0, 2, 5, 7]


def test_a_stage_has_its_layers_and_its_ends() -> None:
    first, last = (stage_of(index, [0, 19], 30) for index in range(2))
    assert (first.layers(30), first.is_first, first.is_last) == (range(19), True, False)
    assert (last.layers(30), last.is_first, last.is_last) == (range(19, 30), False, True)


def test_a_split_that_does_not_fit_is_refused() -> None:
    assert read_split("14,16", 2, 30) == [0, 14]
    with pytest.raises(ConfigError, match=r"must be numbers of layers, one for each stage, such as 15,15"):
        read_split("half", 2, 30)
    for wrong in ("30", "10,10,10", "0,30", "14,17", "-1,31"):
        with pytest.raises(ConfigError, match=r"must have 2 numbers above 0.*30 layers"):
            read_split(wrong, 2, 30)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 31 is more than this model's 30 layers"):
        check_stages(31, 30)


def test_pages_of_a_stage_hold_its_layers_in_the_tables_of_all() -> None:
    whole = PageLayout.of((4, 0, 4, 0, 4, 0), 64)
    assert len(whole.windows) == 2
    part = whole.of_stage(range(2, 5))  # windows 4, 0, 4
    assert part.windows == whole.windows and part.group_of == whole.group_of
    assert part.num_places == 2
    of_window = [part.place_of[layer] for layer in (2, 4)]
    assert of_window == [0, 1] and part.place_of[3] == 0
