"""`contains`, `minContains` and `maxContains` as a choice of the positions at which items match."""

import itertools
import math
from typing import Any

Schema = dict[str, Any]

MAX_POSITIONS = 16  # items of an array among which the matching ones may be anywhere
_FIRST = (
    4  # of a longer one: items among which they are. Few, so that an answer that comes to its end can still have them
)
_MAX_CASES = 64


def contains_cases(
    wanted: Schema | bool, others: Schema | bool, least: int, most: int | None, longest: int | None
) -> tuple[list[Schema], bool]:
    """Schemas of arrays, of which one applies to each array that has `least` to `most` matching items (`most` None: any number), among
    its first ones, and whether that is all of them. No schemas: there are too many ways. `wanted`: matches; `others`: does not; only
    needed if there is a most. `longest`: items that the array may have."""
    counts = [least] if most is None else range(least, most + 1)
    is_long = longest is None or longest > MAX_POSITIONS
    num_positions = max(_FIRST, min(least, MAX_POSITIONS)) if longest is None or is_long else longest
    while num_positions and _num_cases(num_positions, counts) > _MAX_CASES:
        num_positions -= 1
    if num_positions < least and (longest is None or longest >= least):
        return [], False
    between: Schema | bool = True if most is None else others
    cases: list[Schema] = []
    for count in counts:
        if count > num_positions:  # a client's `most` may be any number
            break
        for places in itertools.combinations(range(num_positions), count):
            case: Schema = {"type": "array"}
            if places:
                case["prefixItems"] = [wanted if at in places else between for at in range(places[-1] + 1)]
                case["minItems"] = places[-1] + 1
            if most is not None:
                case["items"] = others
            cases.append(case)
    return cases, longest is not None and longest <= num_positions


def _num_cases(num_positions: int, counts: "list[int] | range") -> int:
    return sum(math.comb(num_positions, count) for count in counts[: _MAX_CASES + 1])
