"""Costs of steps: fitted to measured ones, whatever else happens on the machine, in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import StepPlan
from octavo.schedule.step_costs import (
    MAX_CELLS,
    ONE_ROW,
    SAMPLES_PER_CELL,
    UNBOUNDED,
    VERIFIED_ROW,
    Sample,
    StepCosts,
    StepSamples,
    StepShape,
    fit,
    pairs_of,
    shape_of,
)

CPU = StepCosts(0.006, 0.0006, 0.0004, 3e-7, 2.8e-7)  # about SmolLM2-135M on two cores
GPU = StepCosts(0.004, 0.00001, 0.00003, 1e-9, 2e-9)


def any_shape(r: random.Random) -> StepShape:
    rows = r.randrange(1, 65)
    contexts = [r.randrange(8000) for _ in range(rows)]
    if r.random() < 0.6:
        return StepShape(rows, 0, sum(contexts), 0)
    count = r.randrange(2, 512)
    return StepShape(rows, count - 1, sum(contexts[1:]), pairs_of(r.randrange(8000), count))


def test_the_shape_of_a_plan():
    plan = StepPlan(0, [], [], [], [0, 1, 2], [100, 7, 40], [1, 3, 1], [True] * 3, [], [], [])
    assert shape_of(plan, 5) == StepShape(3, 2, 140, 8 + 9 + 10)
    plan = StepPlan(0, [], [], [], [0, 1], [100, 7], [1, 1], [True] * 2, [], [], [])
    assert shape_of(plan, 2) == StepShape(2, 0, 107, 0)


@pytest.mark.parametrize("true", [CPU, GPU])
def test_measured_steps_are_found_again(true):
    r, samples = random.Random(1), StepSamples()
    for _ in range(2000):
        shape = any_shape(r)
        samples.add(shape, true.seconds(shape) * r.uniform(0.97, 1.03))
    found = samples.fit()
    for _ in range(200):
        shape = any_shape(r)
        assert found.seconds(shape) == pytest.approx(true.seconds(shape), rel=0.1)


def test_steps_that_were_held_up_change_little():
    """One in ten takes up to ten times as long, as on a shared machine; the very first takes seconds, as where kernels are compiled."""
    r, samples = random.Random(2), StepSamples()
    first = any_shape(r)
    samples.add(first, 5.0)
    for _ in range(2000):
        shape = any_shape(r)
        samples.add(shape, CPU.seconds(shape) * (r.uniform(1, 10) if r.random() < 0.1 else r.uniform(0.95, 1.05)))
    found = samples.fit()
    errors = sorted(abs(found.seconds(shape) / CPU.seconds(shape) - 1) for shape in (any_shape(r) for _ in range(200)))
    assert errors[180] < 0.15


def test_a_machine_that_became_slower_is_noticed():
    r, samples = random.Random(3), StepSamples()
    for factor in (1, 3):
        for _ in range(1500):
            shape = any_shape(r)
            samples.add(shape, factor * CPU.seconds(shape))
    shape = StepShape(32, 0, 32 * 300, 0)
    assert samples.fit().seconds(shape) == pytest.approx(3 * CPU.seconds(shape), rel=0.15)


def test_rare_steps_are_not_forgotten():
    """A day of decoding does not wear out what was learned from the few prompts before it."""
    r, samples = random.Random(4), StepSamples()
    for _ in range(300):
        shape = any_shape(r)
        samples.add(shape, CPU.seconds(shape))
    for number in range(50_000):
        shape = StepShape(32, 0, 32 * (200 + number % 100), 0)
        samples.add(shape, CPU.seconds(shape))
    chunk = StepShape(32, 300, 32 * 250, pairs_of(500, 301))
    assert samples.fit().seconds(chunk) == pytest.approx(CPU.seconds(chunk), rel=0.1)


def test_prompts_of_one_length_are_no_reason_to_fear_longer_ones():
    """Where all prompts are alike, tokens and pairs cannot be told apart."""
    samples = StepSamples()
    for rows in (1, 2, 8, 30):
        for shape in (StepShape(rows, 0, 150 * rows, 0), StepShape(rows, 127, 150 * rows, pairs_of(0, 128))):
            samples.add(shape, CPU.seconds(shape))
    longer = StepShape(1, 127, 0, pairs_of(2000, 128))
    assert samples.fit().seconds(longer) < 3 * CPU.seconds(longer)


def test_memory_is_bounded_and_nonsense_is_ignored():
    r, samples = random.Random(5), StepSamples()
    for _ in range(20_000):
        shape = StepShape(r.randrange(1, 2**12), r.randrange(2**14), r.randrange(2**22), r.randrange(2**26))
        samples.add(shape, r.uniform(0, 1))
    samples.add(StepShape(1, 0, 0, 0), 0.5)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        assert not samples.add(StepShape(1, 0, 0, 0), seconds)
    assert len(samples) == MAX_CELLS == len(samples._added)
    assert all(len(cell) <= SAMPLES_PER_CELL for cell in samples._cells.values())
    assert min(samples.fit().seconds(any_shape(r)) for _ in range(100)) >= 0


def test_nothing_is_claimed_of_another_size_before_two_were_measured():
    samples = StepSamples()
    assert samples.fit() is None
    assert samples.add(StepShape(1, 100, 0, 5050), 0.05), "the first of its kind"
    assert not samples.add(StepShape(1, 101, 0, 5150), 0.05)
    assert samples.fit() is None
    samples.add(StepShape(1, 0, 100, 0), 0.01)
    assert samples.fit() is not None
    samples = StepSamples()
    for more in (100, 500):
        samples.add(StepShape(4, more, 300, pairs_of(0, more)), 0.01 + 0.001 * more)
    assert samples.fit().seconds(StepShape(4, 0, 300, 0)) == pytest.approx(0.01, rel=0.5), (
        "without a step of streams alone"
    )


def test_trial_steps_are_one_of_the_two_sizes():
    """On a busy server all steps may have about as many prompt tokens for minutes. Without a second size there would be no limit."""
    samples = StepSamples()
    samples.add_trial(ONE_ROW, CPU.seconds(ONE_ROW))
    for number in range(8):
        shape = StepShape(33, 112 + number, 4000, pairs_of(100 * number, 113 + number))
        samples.add(shape, CPU.seconds(shape))
    assert samples.fit() is None, "rows cannot be told from prompts"
    samples.add_trial(VERIFIED_ROW, CPU.seconds(VERIFIED_ROW))
    costs = samples.fit()
    for more in (40, 112, 240):
        shape = StepShape(33, more, 4000, pairs_of(0, more + 1))
        assert costs.seconds(shape) == pytest.approx(CPU.seconds(shape), rel=0.15)
    samples = StepSamples()
    samples.add_trial(ONE_ROW, CPU.seconds(ONE_ROW))
    samples.add_trial(VERIFIED_ROW, CPU.seconds(VERIFIED_ROW))
    assert samples.fit() is None
    samples.add(StepShape(4, 0, 400, 0), 0.02)
    assert samples.fit() is None, "no step with prompts yet"


@given(
    st.lists(
        st.tuples(
            st.builds(StepShape, st.integers(1, 64), st.integers(0, 512), st.integers(0, 10**6), st.integers(0, 10**6)),
            st.floats(1e-6, 100),
        ),
        max_size=12,
    )
)
def test_no_cost_is_negative(samples):
    costs = fit([(Sample(shape, seconds), 1.0) for shape, seconds in samples])
    assert min(costs.step, costs.row, costs.token, costs.context, costs.pair) >= 0


@given(
    st.builds(
        StepCosts,
        *([st.sampled_from([0.0, 1e-6, 1e-3])] * 2),
        st.sampled_from([0.0, 1e-6, 4e-4]),
        st.just(0.0),
        st.sampled_from([0.0, 1e-9, 3e-7]),
    ),
    st.floats(0, 1),
    st.integers(0, 100_000),
)
def test_a_prompt_gets_all_the_tokens_there_is_time_for_and_no_more(costs, seconds, start):
    most = costs.tokens_within(seconds, start)
    assert 0 <= most <= UNBOUNDED
    if most:
        assert costs.chunk_seconds(start, most) <= seconds * (1 + 1e-6) + 1e-12
    if most < UNBOUNDED:
        assert costs.chunk_seconds(start, most + 1) >= seconds * (1 - 1e-6) - 1e-12
