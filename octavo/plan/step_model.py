"""StepModel: how long a step takes on one machine, for a simulation's clock; and how it is fitted to measured steps.

A step's seconds are a curve over all tokens that it computes (weights are read once, so it is flat at first on a GPU), so much for each
row that samples, for each position that a row with one token looks back at, and for each pair of a token and a position before it in
the other rows. The scheduler itself learns the simpler StepCosts, as in an engine.

The clock counts whole picoseconds: sums of integers do not depend on their order, so a jump over many steps ends at the very
moment at which the steps would."""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.schedule.step_costs import MOST_SPREAD, Sample, StepCosts, StepShape, learned_spread
from octavo.schedule.step_costs import fit as fit_costs

Numbers = npt.NDArray[np.float64]

PICOSECONDS = 10**12
_KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
_OUTLIER = 3.0  # a sample that took so many times as long as the first fit says does not count
_NOISE_PARTS = 64
_LEAST_NOISE = 0.5  # no step takes less than this share of its time
_CELL = 10  # samples of about one size, whose mean is compared with the model's
AFTER_FIRST = 4
"""Steps after one that gave a request its first token take longer: meanwhile an API process begins its response. Each of so many has half of what the
one before it has."""


class MeasuredStep(NamedTuple):
    shape: StepShape
    seconds: float  # from the result before it to its own; from the arrival of its request, where the engine was idle
    wakes: bool = False  # the engine was idle before it
    after_first: float = 0.0  # 1, ½, ¼ or ⅛: one step after one that gave a first token, or two, …; 0: more


class StepModel(msgspec.Struct, frozen=True):
    """`seconds` of the products of `tokens` tokens, between which it is linear; beyond the last it goes on as between the last two."""

    tokens: list[int]
    seconds: list[float]
    row: float  # seconds more for each row
    context: float  # for each position that a row with one token looks back at
    pair: float  # for each pair of a token and a position at or before it, in rows with several tokens
    # Steps with prompts take so many times as long as this says, one as often as another; 1 on average. Empty: no step differs.
    noise: list[float] = []
    # … where they take so long; 0: all of them. What holds steps up comes at random times, so its share of a step falls with the root of the step's time.
    noise_seconds: float = 0.0
    # The same of steps without prompts. They are many, and their differences cancel out over a request; of the times between tokens they decide
    # the longest, so only those are spread by it.
    steady_noise: list[float] = []
    # Speculative decoding: so many tokens are drafted for each row, and each is accepted with this probability if those before it were. Without a
    # prompt in a step, and only where a token then takes less time: a scheduler drafts no more than pays.
    draft_tokens: int = 0
    acceptance: float = 0.0
    wake: float = 0.0  # seconds more for the first step after an engine was idle
    first: float = 0.0  # … for a step after one that gave a request its first token; of those that follow, AFTER_FIRST
    margin: float = 1.0  # StepCosts.spread: times what the scheduler foresees that most steps with prompts beside other rows take at most

    def __post_init__(self) -> None:
        numbers = [
            *self.seconds,
            self.row,
            self.context,
            self.pair,
            self.wake,
            self.first,
            self.noise_seconds,
            *self.noise,
            *self.steady_noise,
        ]
        is_ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds) or not is_ascending or self.tokens[0] < 1:
            raise ValueError("tokens must be at least two ascending numbers, with as many seconds")
        if not 0 <= self.draft_tokens <= 64 or not 0 <= self.acceptance <= 1:
            raise ValueError("draft_tokens must be from 0 to 64, and acceptance from 0 to 1")
        if not 1 <= self.margin <= MOST_SPREAD:
            raise ValueError(f"margin must be from 1 to {MOST_SPREAD}")
        if not all(math.isfinite(number) and 0 <= number < 1e6 for number in numbers) or not self.seconds[0]:
            raise ValueError("seconds must be positive and finite")

    def products(self, num_tokens: int) -> float:
        """Seconds of a step's constant part and of its products."""
        at = min(max(bisect.bisect_left(self.tokens, num_tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (high - low)
        return self.seconds[at - 1] + slope * (num_tokens - low)

    def step_seconds(self, shape: StepShape) -> float:
        num_tokens = shape.rows + shape.more_tokens
        return (
            self.products(num_tokens) + self.row * shape.rows + self.context * shape.context + self.pair * shape.pairs
        )

    def seconds_of(self, step: MeasuredStep) -> float:
        return self.step_seconds(step.shape) + self.wake * step.wakes + self.first * step.after_first

    @property
    def tokens_per_step(self) -> float:
        """That a row with drafts gets from one step, on average: 1 + a + a² + …"""
        return float(sum(self.acceptance**power for power in range(self.draft_tokens + 1)))

    def scaled(self, factor: float) -> "StepModel":
        """Every step takes `factor` times as long."""
        return msgspec.structs.replace(
            self,
            seconds=[each * factor for each in self.seconds],
            row=self.row * factor,
            context=self.context * factor,
            pair=self.pair * factor,
            noise_seconds=self.noise_seconds * factor,
            wake=self.wake * factor,
            first=self.first * factor,
        )

    def at_speed(self, prompts: float, rows: float) -> "StepModel":
        """What prompts add to steps takes `prompts` times as long, and all other parts `rows` times."""
        base = self.seconds[0]
        seconds = [base * rows + (each - base) * prompts for each in self.seconds]
        return msgspec.structs.replace(
            self.scaled(rows), seconds=seconds, pair=self.pair * prompts, noise_seconds=self.noise_seconds * prompts
        )

    def costs(self, max_rows: int, max_tokens: int) -> StepCosts:
        """What an engine on this machine learns of its steps: the sum that fits steps up to these sizes best."""
        shapes = [StepShape(rows, 0, rows * context, 0) for rows in _up_to(max_rows) for context in (0, 512, 2048)]
        for tokens in _up_to(max_tokens):
            for start in (0, 1024):
                pairs = tokens * start + tokens * (tokens + 1) // 2
                shapes += [StepShape(rows, tokens, rows * 512, pairs) for rows in (1, min(16, max_rows))]
        samples = [Sample(shape, self.step_seconds(shape)) for shape in shapes]
        found = fit_costs([(sample, 1 / sample.seconds**2) for sample in samples])
        return msgspec.structs.replace(found, spread=self.margin)


def _up_to(most: int) -> list[int]:
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class StepClock:
    """A StepModel in whole picoseconds."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._pair, self._noise = round(model.pair * PICOSECONDS), model.noise
        self._noise_at = model.noise_seconds * PICOSECONDS
        self._wake = round(model.wake * PICOSECONDS)
        self._after_first = [round(model.first * PICOSECONDS / 2**at) for at in range(AFTER_FIRST)]
        self.has_firsts = model.first > 0
        self._bases: dict[tuple[int, int], int] = {}
        self._contexts: dict[int, int] = {}

    def base(self, rows: int, more_tokens: int = 0) -> int:
        """A step without contexts and pairs."""
        base = self._bases.get((rows, more_tokens))
        if base is None:
            seconds = self._plain(rows, more_tokens)
            if not more_tokens and self._drafts(rows):
                model = self._model
                seconds = self._plain(rows * (1 + model.draft_tokens), 0) / model.tokens_per_step
            base = self._bases[rows, more_tokens] = max(1, round(seconds * PICOSECONDS))
        return base

    def context(self, rows: int) -> int:
        """For each position that a row looks back at, in a step of so many rows without prompts."""
        context = self._contexts.get(rows)
        if context is None:
            model = self._model
            factor = (1 + model.draft_tokens) / model.tokens_per_step if self._drafts(rows) else 1.0
            context = self._contexts[rows] = round(model.context * factor * PICOSECONDS)
        return context

    def _plain(self, rows: int, more_tokens: int) -> float:
        return self._model.products(rows + more_tokens) + self._model.row * rows

    def _drafts(self, rows: int) -> bool:
        model = self._model
        if not model.draft_tokens or not rows:
            return False
        return self._plain(rows * (1 + model.draft_tokens), 0) / model.tokens_per_step < self._plain(rows, 0)

    def more(self, wakes: bool, since_first: int) -> int:
        """That a step takes longer if it `wakes` the engine, and so many steps after one that gave a first token."""
        if wakes:
            return self._wake
        return self._after_first[since_first] if since_first < AFTER_FIRST else 0

    def step(self, shape: StepShape, number: int = 0) -> int:
        """`number`: of the step; the same one takes the same time."""
        rows, more_tokens, context, pairs = shape
        each = self.context(0 if more_tokens else rows)
        steady = self.base(rows, more_tokens) + each * context + self._pair * pairs
        if not more_tokens or not self._noise:
            return steady
        at = (number * 0x9E3779B1 & 0xFFFFFFFF) * len(self._noise) >> 32
        share = math.sqrt(self._noise_at / steady) if self._noise_at else 1.0
        return round(steady * max(_LEAST_NOISE, 1 + (self._noise[at] - 1) * share))


# ── fitting ─────────────────────────────────────────────────────────────────────────────────────────


_STRETCH_SECONDS = 2.0
_SLOW = 1.4  # a stretch in which steps took so many times as long as alike ones at another time


def without_slow_stretches(timed: Sequence[tuple[float, MeasuredStep]]) -> tuple[list[MeasuredStep], float]:
    """Leave out the stretches of time in which all steps took much longer than alike ones did at another time: on a shared machine others computed
    then, and a plan is for a machine of one's own. Returns the others, and the share of the steps' time that was left out. `timed`: with when each
    ended."""
    by_stretch: dict[int, list[MeasuredStep]] = {}
    for ended, sample in timed:
        by_stretch.setdefault(int(ended / _STRETCH_SECONDS), []).append(sample)
    shortest: dict[tuple[int, ...], float] = {}
    for samples in by_stretch.values():
        cells: dict[tuple[int, ...], list[float]] = {}
        for sample in samples:
            cells.setdefault(_cell(sample), []).append(sample.seconds)
        for cell, seconds in cells.items():
            shortest[cell] = min(shortest.get(cell, math.inf), float(np.median(seconds)))
    kept: list[MeasuredStep] = []
    left_out = whole = 0.0
    for samples in by_stretch.values():
        spent = sum(sample.seconds for sample in samples)
        whole += spent
        if float(np.median([sample.seconds / shortest[_cell(sample)] for sample in samples])) > _SLOW:
            left_out += spent
        else:
            kept += samples
    return kept, left_out / whole if whole else 0.0


def _cell(sample: MeasuredStep) -> tuple[int, ...]:
    """Steps of about one size: each number has as many bits."""
    return tuple(number.bit_length() for number in sample.shape)


class Fit(msgspec.Struct, frozen=True):
    model: StepModel
    num_samples: int
    noise: float  # median share by which single steps are off
    median_error: float  # … and by which the means of steps of about one size are, of which there are several
    p90_error: float


def fit_model(samples: Sequence[MeasuredStep]) -> Fit:
    """Least squares of relative deviations, with slopes and coefficients of at least 0, without samples that are far off. It is the mean of
    steps that is found, not the shortest: what holds a step up now and then does so in the plan, too. Raises ValueError where samples have no
    two sizes."""
    sizes = sorted({sample.shape.rows + sample.shape.more_tokens for sample in samples})
    if len(sizes) < 2:
        raise ValueError("all measured steps computed the same number of tokens")
    knots = [sizes[0], *(knot for knot in _KNOTS if sizes[0] < knot < sizes[-1]), sizes[-1]]
    seconds = np.array([sample.seconds for sample in samples])
    columns = [np.ones(len(samples))]
    tokens = np.array([sample.shape.rows + sample.shape.more_tokens for sample in samples], float)
    for low, high in itertools.pairwise(knots):
        columns.append(np.clip(tokens - low, 0, high - low))
    for name in ("rows", "context", "pairs"):
        columns.append(np.array([getattr(sample.shape, name) for sample in samples], float))
    columns += [np.array([getattr(sample, name) for sample in samples], float) for name in ("wakes", "after_first")]
    matrix = np.stack(columns, axis=1)
    weights = 1 / seconds
    found = _nonnegative(matrix * weights[:, None], seconds * weights)
    for _ in range(4):
        # By what the model says, not by what was measured: else long ones of equal steps would count less, and means come out too short.
        predicted = np.maximum(matrix @ found, 1e-9)
        weights = np.where(seconds > _OUTLIER * predicted, 0.0, 1 / predicted)
        found = _nonnegative(matrix * weights[:, None], seconds * weights)
    values, value = [float(found[0])], float(found[0])
    for slope, low, high in zip(found[1:-5], knots, knots[1:], strict=False):
        value += float(slope) * (high - low)
        values.append(value)
    values[0] = max(values[0], 1e-9)
    predicted = matrix @ found
    has_prompt = np.array([sample.shape.more_tokens > 0 for sample in samples])
    row, context, pair, wake, first = (float(each) for each in found[-5:])
    typical = float(np.exp(np.log(np.maximum(predicted[has_prompt], 1e-9)).mean())) if has_prompt.any() else 0.0
    noise, steady_noise = (
        _noise(seconds[each], predicted[each], at) for each, at in ((has_prompt, typical), (~has_prompt, 0.0))
    )
    model = StepModel(
        knots, values, row, context, pair, noise, typical if noise else 0.0, steady_noise, wake=wake, first=first
    )
    model = msgspec.structs.replace(model, margin=_margin(model, samples))
    errors = np.sort(_cell_errors(samples, predicted, seconds)) if len(samples) else np.zeros(1)
    off = float(np.median(np.abs(predicted / seconds - 1)))
    return Fit(model, len(samples), off, float(np.median(errors)), float(errors[int(0.9 * (len(errors) - 1))]))


def _margin(model: StepModel, samples: Sequence[MeasuredStep]) -> float:
    """What an engine's CostMeter finds, by the costs that a simulated scheduler has."""
    most_rows = max(sample.shape.rows for sample in samples)
    costs = model.costs(most_rows, max(1, *(sample.shape.more_tokens for sample in samples)))
    beside = [sample for sample in samples if sample.shape.more_tokens and sample.shape.context]
    return learned_spread([sample.seconds / costs.seconds(sample.shape) for sample in beside])


def _noise(seconds: Numbers, predicted: Numbers, typical: float) -> list[float]:
    """How many times as long as predicted steps took: the middles of equal parts of them. `typical`: for steps that take so long; 0: for all."""
    if len(seconds) < _NOISE_PARTS:
        return []
    predicted = np.maximum(predicted, 1e-9)
    ratios = seconds / predicted
    is_usual = ratios < _OUTLIER
    if typical:
        ratios = np.maximum(1 + (ratios - 1) * np.sqrt(predicted / typical), _LEAST_NOISE)
    parts = np.quantile(ratios[is_usual], (np.arange(_NOISE_PARTS) + 0.5) / _NOISE_PARTS)
    return [round(float(each), 4) for each in parts / parts.mean()]


def _cell_errors(samples: Sequence[MeasuredStep], predicted: Numbers, seconds: Numbers) -> list[float]:
    """By how much the model is off for steps of about one size, on average."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for at, sample in enumerate(samples):
        cells.setdefault(_cell(sample), []).append(at)
    large = [members for members in cells.values() if len(members) >= _CELL] or [list(range(len(samples)))]
    return [abs(float(predicted[members].sum() / seconds[members].sum()) - 1) for members in large]


def _nonnegative(matrix: Numbers, values: Numbers) -> Numbers:
    """Least squares with coefficients of at least 0: the active-set method of Lawson and Hanson, on columns of equal norm."""
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    scaled = matrix / norms
    size = scaled.shape[1]
    found, is_free = np.zeros(size), np.zeros(size, bool)
    for _ in range(3 * size):
        gradient = scaled.T @ (values - scaled @ found)
        gradient[is_free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * max(1.0, float(np.linalg.norm(values))):
            break
        is_free[best] = True
        while True:
            free = np.flatnonzero(is_free)
            solved = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            if solved.min() > 0:
                found[:] = 0
                found[free] = solved
                break
            steps = [
                found[at] / (found[at] - new) if found[at] > new else np.inf
                for at, new in zip(free, solved, strict=True)
                if new <= 0
            ]
            share = min([step for step in steps if np.isfinite(step)], default=0.0)
            found[free] += share * (solved - found[free])
            dropped = free[(found[free] <= 1e-15) & (solved <= 0)]
            if not len(dropped):
                dropped = free[[int(np.argmin(solved))]]
            found[dropped] = 0
            is_free[dropped] = False
            if not is_free.any():
                break
    unscaled: Numbers = found / norms
    return unscaled
