"""StepTotals: running totals over all steps. The difference of two readings describes the steps in between, however many; adding a
step costs the same whatever its rows are."""

import functools
import operator
from bisect import bisect_left
from typing import NamedTuple

MS_BOUNDS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
"""Inclusive upper bounds of a step's milliseconds; one more bucket holds what is above them all."""
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_SECOND_BOUNDS = tuple(bound / 1000 for bound in MS_BOUNDS)


class Look(NamedTuple):
    """The totals at one moment."""

    num_steps: int = 0
    num_rows: int = 0
    num_mixed: int = 0
    by_ms: tuple[int, ...] = (0,) * (len(MS_BOUNDS) + 1)
    by_rows: tuple[int, ...] = (0,) * (len(ROW_BOUNDS) + 1)


class StepTotals:
    __slots__ = ("_by_ms", "_by_rows", "_num_mixed", "_num_rows", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_rows = 0
        self._num_mixed = 0
        self._by_ms = [0] * (len(MS_BOUNDS) + 1)
        self._by_rows = [0] * (len(ROW_BOUNDS) + 1)

    def add(self, seconds: float, num_rows: int, num_tokens: int) -> None:
        """A step was committed `seconds` after the one before it."""
        self.num_steps += 1
        self._num_rows += num_rows
        if num_tokens > num_rows:
            self._num_mixed += 1  # some row computed more than one token: a prompt, or one computed again
        self._by_ms[bisect_left(_SECOND_BOUNDS, seconds)] += 1
        self._by_rows[bisect_left(ROW_BOUNDS, num_rows)] += 1

    def look(self) -> Look:
        return Look(self.num_steps, self._num_rows, self._num_mixed, tuple(self._by_ms), tuple(self._by_rows))


def between(earlier: Look, later: Look) -> Look:
    """Totals of the steps that were added between two looks."""
    return Look(
        later.num_steps - earlier.num_steps,
        later.num_rows - earlier.num_rows,
        later.num_mixed - earlier.num_mixed,
        tuple(map(operator.sub, later.by_ms, earlier.by_ms)),
        tuple(map(operator.sub, later.by_rows, earlier.by_rows)),
    )


def histogram(counts: tuple[int, ...], bounds: tuple[float, ...]) -> dict[str, int]:
    """Counts by the upper bound of their bucket, as text; empty buckets are left out."""
    return {name: count for name, count in zip(_names(bounds), counts, strict=True) if count}


@functools.cache
def _names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Names of the buckets: only a few tuples of bounds exist."""
    return (*(f"{bound:g}" for bound in bounds), "more")
