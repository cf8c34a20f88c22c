"""Stage: which of a model's layers a rank computes, where layers are divided over stages (pipeline parallelism), and how they are
divided."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers first … end − 1. The first stage also has the embedding, the last one the final norm and the head."""

    index: int = 0
    count: int = 1
    first: int = 0
    end: int = sys.maxsize  # no smaller than the number of layers: all from `first` on

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        return range(self.first, min(self.end, num_layers))


WHOLE = Stage()


def check_stages(count: int, num_layers: int) -> None:
    if count > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {count} is more than this model's {num_layers} layers: "
            f"use {num_layers} or less, each stage needs a layer"
        )


def read_split(setting: str, count: int, num_layers: int) -> list[int]:
    """Where each stage begins, from a --pipeline-layer-split such as "14,16": the layers of each stage."""
    try:
        sizes = [int(part) for part in setting.split(",")]
    except ValueError:
        raise ConfigError(
            f"--pipeline-layer-split {setting[:40]!r}: it must be numbers of layers, one for each stage, such as "
            f"{','.join(str(size) for size in _sizes(even_split(count, num_layers), num_layers))}"
        ) from None
    if len(sizes) != count or min(sizes) < 1 or sum(sizes) != num_layers:
        raise ConfigError(
            f"--pipeline-layer-split {setting[:40]}: it must have {count} numbers above 0, one for each stage "
            f"(--pipeline-parallel-size), and their sum must be the model's {num_layers} layers"
        )
    return [sum(sizes[:at]) for at in range(count)]


def even_split(count: int, num_layers: int) -> list[int]:
    return [at * num_layers // count for at in range(count)]


def split(costs: Sequence[float], before: float, after: float, count: int) -> list[int]:
    """Where each of `count` stages begins, so that the most expensive one is as cheap as possible; of several such splits, one whose
    stages are the most alike. `costs`: of each layer. `before`, `after`: of what the first and the last stage have besides layers."""
    num_layers = len(costs)
    assert 1 <= count <= num_layers
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def stage_cost(at: int, first: int, end: int) -> float:
        return sums[end] - sums[first] + (before if at == 0 else 0.0) + (after if at == count - 1 else 0.0)

    # best[end]: (the most expensive of the stages so far, the sum of squares, their beginnings) with `end` layers in them.
    best = {end: (stage_cost(0, 0, end), stage_cost(0, 0, end) ** 2, [0]) for end in range(1, num_layers + 1)}
    for at in range(1, count):
        found: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(at + 1, num_layers + 1):
            choices = (
                (max(most, cost), squares + cost**2, [*starts, first])
                for first, (most, squares, starts) in best.items()
                if first < end
                for cost in (stage_cost(at, first, end),)
            )
            found[end] = min(choices)
        best = found
    return best[num_layers][2]


def stage_of(index: int, starts: Sequence[int], num_layers: int) -> Stage:
    ends = [*starts[1:], num_layers]
    return Stage(index, len(starts), starts[index], ends[index])


def in_words(starts: Sequence[int], num_layers: int) -> str:
    """Such as "14 + 16 layers"."""
    return " + ".join(str(size) for size in _sizes(starts, num_layers)) + " layers"


def _sizes(starts: Sequence[int], num_layers: int) -> list[int]:
    return [end - start for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]
