"""StepCosts: how long a step takes, as a function of what it computes. It is fitted to measured steps, and pure: who measures is not
its concern (engine/cost_meter.py), and a scheduler is given costs as one more input, which is recorded.

A drafted token (decision 048) costs what a row costs: it is sampled after. A step's seconds are a sum: a constant (reading the weights), so much for each row, for each further token of a row that computes
several, for each position that a row with one token looks back at, and for each pair of a token and a position before it in the other
rows. On a GPU the weights are read while the products are computed, so steps of middling size are shorter than this sum says."""

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from octavo.messages import StepPlan

UNBOUNDED = 2**31  # tokens: more than any step computes
MAX_CELLS, SAMPLES_PER_CELL = 64, 5
_AGE = 2048  # samples, after which an old one counts for half as much as a new one
_OUTLIER = 0.2  # a cell that is off by this share of its seconds counts for half in the second pass
# Where two coefficients cannot be told apart, each gets a part: positions a small one, because prompts of one length look like a
# cost of positions, which would be far too high for longer ones.
_RIDGE = (1e-6, 1e-6, 1e-6, 1e-4, 1e-4)


class StepShape(NamedTuple):
    """What a step computes, as far as its duration depends on it."""

    rows: int  # and drafted tokens
    more_tokens: int  # beyond one in each row
    context: int  # tokens before the one that is computed, summed over the rows that compute one
    pairs: int  # of a token and a token at or before it, over the other rows


COST_PARTS = ("step", "row", "token", "context", "pair")
"""The fields of StepCosts that make up a step's seconds."""
ONE_ROW = StepShape(rows=1, more_tokens=0, context=0, pairs=0)
VERIFY_TOKENS = 8
VERIFIED_ROW = StepShape(VERIFY_TOKENS, 0, VERIFY_TOKENS * (VERIFY_TOKENS - 1) // 2, 0)
"""A row without a context that verifies so many tokens less one."""


def pairs_of(start: int, count: int) -> int:
    """How many positions `count` tokens look at, the first of which is at `start`."""
    return count * start + count * (count + 1) // 2


def shape_of(plan: StepPlan, num_tokens: int, proposed: Sequence[int] = ()) -> StepShape:
    """`num_tokens`: the sum of the plan's counts. `proposed`: tokens of each draft, where a draft model had fewer than planned."""
    num_rows = len(plan.rows)
    if num_tokens == num_rows:  # as in most steps
        return StepShape(num_rows, 0, sum(plan.starts), 0)
    context = pairs = num_drafted = 0
    drafted = {draft.at: len(draft.tokens) for draft in plan.drafts}
    missing = {
        draft.at: len(draft.tokens) - count for draft, count in zip(plan.drafts, proposed, strict=bool(proposed))
    }
    num_tokens -= sum(missing.values())
    for at, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        if at in drafted:
            count -= missing.get(at, 0)
            num_drafted += drafted[at] - missing.get(at, 0)
            context += pairs_of(start - 1, count)
        elif count == 1:
            context += start
        else:
            pairs += pairs_of(start, count)
    return StepShape(num_rows + num_drafted, num_tokens - num_rows - num_drafted, context, pairs)


class StepCosts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds, but for `draft`, `draft_low` and `spread`; none of them negative."""

    step: float
    row: float
    token: float
    context: float
    pair: float
    draft: float = 0.0  # seconds of a pass of the draft model, for each of a step with the same tokens; 0: not known, or there is none
    draft_low: float = 0.0  # … that it may be by now: less, the longer no pass was measured; 0: the same
    spread: float = 1.0  # times the foreseen seconds that most steps with prompts beside other rows take at most
    # What a step with drafts takes besides, because it is planned and committed while nothing is computed; other steps are on the way then.
    host: float = 0.0
    host_row: float = 0.0  # for each row
    # How much longer than the sum of these costs steps without prompts and drafts take, where the host's cores compute them: work of other
    # processes for each of their tokens is no part of their shape.
    beyond: float = 0.0
    beyond_row: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        return (
            self.step
            + self.row * shape.rows
            + self.token * shape.more_tokens
            + self.context * shape.context
            + self.pair * shape.pairs
        )

    def decode_seconds(self, shape: StepShape) -> float:
        """Of a step without prompts and drafts."""
        return self.seconds(shape) + self.beyond + self.beyond_row * shape.rows

    def host_seconds(self, num_rows: int) -> float:
        """What drafts add to a step of so many rows besides their tokens."""
        return self.host + self.host_row * num_rows

    def chunk_seconds(self, start: int, count: int) -> float:
        """What a row with this part of a prompt adds to a step."""
        return self.row + self.token * (count - 1) + self.pair * pairs_of(start, count)

    def tokens_within(self, seconds: float, start: int) -> int:
        """The longest part of a prompt, from position `start` on, that adds no more than this to a step."""
        # row + token (n − 1) + pair (n start + n (n + 1) / 2) ≤ seconds
        square, linear = self.pair / 2, self.token + self.pair * (start + 0.5)
        rest = seconds - self.row + self.token
        if rest <= 0:
            return 0
        if linear == 0 or math.isinf(rest):
            return UNBOUNDED
        # The root of the quadratic, in the form that is exact for a small square, too.
        most = 2 * rest / (linear + math.sqrt(linear * linear + 4 * square * rest))
        return min(int(most), UNBOUNDED)


NO_COSTS = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)


SPREAD_SAMPLES = 64  # steps with prompts beside other rows, of which an engine finds the spread
_LEAST_SPREAD_SAMPLES = 16
_SPREAD_SHARE = 0.9  # of them take no longer, for what was foreseen, than the spread says
MOST_SPREAD = 1.5  # where other programs disturb a machine, prompts must go on


def learned_spread(ratios: Collection[float]) -> float:
    """StepCosts.spread. `ratios`: what steps with prompts beside other rows took, as shares of what was foreseen."""
    if len(ratios) < _LEAST_SPREAD_SAMPLES:
        return 1.0
    return min(max(sorted(ratios)[int(_SPREAD_SHARE * len(ratios))], 1.0), MOST_SPREAD)


class Sample(NamedTuple):
    shape: StepShape
    seconds: float


class StepSamples:
    """Measured steps, of every kind that came up a few: as many of a kind that is rare as of one that is not. Memory and the time of
    a fit are bounded.

    A cell holds the last samples of steps that are alike: each number of their shapes has as many bits. It stands for itself
    with the one whose duration is the median, so a step that was held up once, or was the first of its kind, changes nothing."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], list[Sample]] = (
            OrderedDict()
        )  # the one that was added to last is last
        self._added: dict[tuple[int, ...], int] = {}  # when that was
        self._trials: list[Sample] = []
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, shape: StepShape, seconds: float) -> bool:
        """True: it is the first of its kind."""
        if not 0 < seconds < math.inf:
            return False
        self.num_added += 1
        rows, more_tokens, context, pairs = shape
        key = (rows.bit_length(), more_tokens.bit_length(), context.bit_length(), pairs.bit_length())
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = []
            if len(self._cells) > MAX_CELLS:
                oldest, _ = self._cells.popitem(last=False)
                del self._added[oldest]
        else:
            self._cells.move_to_end(key)
        self._added[key] = self.num_added
        if len(cell) == SAMPLES_PER_CELL:
            del cell[0]
        cell.append(Sample(shape, seconds))
        return len(cell) == 1

    def add_trial(self, shape: StepShape, seconds: float) -> None:
        """A step that was measured before the first request. It counts in every fit, as one sample does: where all steps have about as
        many rows, nothing else tells the constant part of a step from what its rows take."""
        if 0 < seconds < math.inf:
            self._trials.append(Sample(shape, seconds))

    def fit(self) -> StepCosts | None:
        """None: steps of one size say nothing of another. There must be two sizes, one of them with prompts. Trials with different numbers of
        rows are one: they say what rows cost, and the rest is the prompts'."""
        points: list[tuple[Sample, float]] = []
        for key, cell in self._cells.items():
            middle = sorted(cell, key=lambda sample: sample.seconds)[(len(cell) - 1) // 2]
            age = 1 + (self.num_added - self._added[key]) / _AGE
            # By its square, a deviation counts relative to the step's duration.
            points.append((middle, len(cell) / age / middle.seconds**2))
        sizes = {sample.shape.more_tokens.bit_length() for sample, _ in points}
        if points and len({trial.shape.rows for trial in self._trials}) > 1:
            sizes.add(0)
        if len(sizes) < 2:
            return None
        points += [(trial, 1 / trial.seconds**2) for trial in self._trials]
        first = fit(points)
        again = []
        for sample, weight in points:
            deviation = (first.seconds(sample.shape) - sample.seconds) / sample.seconds
            again.append((sample, weight / (1 + (deviation / _OUTLIER) ** 2)))
        return fit(again)


def fit(points: Sequence[tuple[Sample, float]]) -> StepCosts:
    """Least squares of (sample, weight), with coefficients of at least 0."""
    columns = [(1.0, *map(float, sample.shape)) for sample, _ in points]
    size = 1 + len(StepShape._fields)
    # Numbers of about 1 in all columns: positions are thousands of times as many as rows.
    scales = [max((column[i] for column in columns), default=0.0) for i in range(size)]
    used = [i for i in range(size) if scales[i] > 0]
    while used:
        matrix = [[0.0] * len(used) for _ in used]
        values = [0.0] * len(used)
        for column, (sample, weight) in zip(columns, points, strict=True):
            scaled = [column[i] / scales[i] for i in used]
            for at, one in enumerate(scaled):
                weighted = weight * one
                values[at] += weighted * sample.seconds
                row = matrix[at]
                for other in range(at, len(scaled)):
                    row[other] += weighted * scaled[other]
        for at in range(len(used)):
            matrix[at][at] *= 1 + _RIDGE[used[at]]
            for other in range(at):
                matrix[at][other] = matrix[other][at]
        found = _solve(matrix, values)
        if min(found) >= 0:
            parts = {i: value / scales[i] for i, value in zip(used, found, strict=True)}
            return StepCosts(*(parts.get(i, 0.0) for i in range(size)))
        used.remove(used[found.index(min(found))])
    return NO_COSTS


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting. A variable that has no pivot is 0."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if rows[i][i] == 0:
            rows[i] = [0.0] * i + [1.0] + [0.0] * (size - i)
        for j in range(size):
            if j != i:
                share = rows[j][i] / rows[i][i]
                rows[j] = [a - share * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
