"""Filters and draws against slow references: which tokens survive, and how often each is drawn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import SamplingParams
from octavo.sampling.draw import Draws, _likeliest, draw_filtered, draw_from_all, kept_prefix
from octavo.sampling.randomness import uniforms
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState

EMPTY_TABLE = torch.zeros(1, 1, dtype=torch.int32)


def reference_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], bool]:
    """Return the surviving ids, by one rule after another in plain Python, and whether no value is within rounding of top-p's border."""
    top = max(logits)
    weight = {i: math.exp((x - top) / temperature) for i, x in enumerate(logits)}
    kept = [i for i in weight if weight[i] >= min_p]
    kept = sorted(kept, key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    total, mass, nucleus, clear = sum(weight[i] for i in kept), 0.0, [], True
    for i in kept:
        if top_p < 1.0:
            clear = clear and abs(mass - top_p * total) > 1e-5 * total
            if mass >= top_p * total:
                break
        nucleus.append(i)
        mass += weight[i]
    clear = clear and all(min_p == 0.0 or abs(w - min_p) > 1e-5 for w in weight.values())
    return set(nucleus), clear


def draws(count: int, temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int) -> Draws:
    def column(value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float64)

    k = torch.full((count,), top_k or vocab_size, dtype=torch.int64)
    return Draws(column(temperature), k, column(top_p), column(min_p), torch.linspace(0, 1, count + 1).double()[:-1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], float, int, float, float]:
    vocab_size = draw(st.sampled_from([3, 40, 300, 3000]))
    seed = draw(st.integers(0, 2**32 - 1))
    spread = draw(st.sampled_from([0.1, 1.0, 5.0]))
    logits = np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)
    if draw(st.booleans()):  # many equal logits
        logits = np.round(logits)
    top_k = draw(st.sampled_from([0, 1, 2, 7, 127, 128, 129, 2500]))
    top_p = draw(st.sampled_from([1.0, 0.001, 0.3, 0.9, 0.99]))
    min_p = draw(st.sampled_from([0.0, 0.05, 0.5]))
    temperature = draw(st.sampled_from([0.3, 1.0, 2.0]))
    return logits.tolist(), temperature, min(top_k, vocab_size - 1), top_p, min_p


@settings(max_examples=250, deadline=None)
@given(cases())
def test_filters_keep_what_the_reference_keeps(case: tuple[list[float], float, int, float, float]) -> None:
    logits, temperature, top_k, top_p, min_p = case
    expected, clear = reference_kept(logits, temperature, top_k, top_p, min_p)
    if not clear:
        return
    row = torch.tensor([logits])
    asked = draws(1, temperature, top_k, top_p, min_p, len(logits))
    values, ids = _likeliest(row, len(logits))
    keep = kept_prefix(row, values, asked)
    assert set(ids[keep].tolist()) == expected

    # The drawn tokens, tier after tier, never leave that set and reach both of its ends.
    many = draws(64, temperature, top_k, top_p, min_p, len(logits))
    many.uniform[-1] = 1 - 2.0**-53
    drawn = draw_filtered(row.expand(64, -1).contiguous(), many)
    assert set(drawn.tolist()) <= expected
    assert drawn[0] == min(expected)
    heavy = [i for i in expected if (logits[i] - max(logits)) / temperature > -20]
    assert drawn[-1] >= max(heavy)  # the largest uniform is 2**-53 below 1: it may miss a tail lighter than that


def test_the_likeliest_of_equals_are_the_lowest_ids() -> None:
    logits = torch.zeros(1, 5000)
    for top_k in (5, 200, 2100):
        asked = draws(400, 1.0, top_k, 1.0, 0.0, 5000)
        drawn = draw_filtered(logits.expand(400, -1).contiguous(), asked)
        assert drawn.max() < top_k
        assert drawn.max() >= top_k * 0.9 - 1


@pytest.mark.parametrize("vocab_size", [50, 256, 1000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 1.0, 0.1), (20, 1.0, 0.0), (0, 0.8, 0.0), (30, 0.7, 0.02)]
)
def test_drawn_tokens_follow_the_exact_distribution(vocab_size: int, top_k: int, top_p: float, min_p: float) -> None:
    num_draws, temperature = 20_000, 0.8
    logits = np.random.default_rng(7).normal(0, 2, vocab_size).astype(np.float32)
    kept, clear = reference_kept(logits.tolist(), temperature, top_k, top_p, min_p)
    assert clear
    exact = np.zeros(vocab_size)
    exact[sorted(kept)] = np.exp((logits[sorted(kept)].astype(np.float64) - logits.max()) / temperature)
    exact /= exact.sum()

    state = SamplingState(1, vocab_size)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    state.enter(0, params, seed=1234, prompt_len=1, stop_ids=[])
    counts = np.zeros(vocab_size)
    for start in range(0, num_draws, 2000):
        positions = np.arange(start, start + 2000)
        rows = np.zeros(2000, dtype=np.int64)
        drawn = sample(torch.from_numpy(logits).repeat(2000, 1), EMPTY_TABLE, state, rows, positions)
        counts += np.bincount(drawn.numpy(), minlength=vocab_size)
    assert counts[exact == 0].sum() == 0
    common = exact * num_draws >= 5
    expected = np.append(exact[common], exact[~common].sum()) * num_draws
    seen = np.append(counts[common], counts[~common].sum())
    expected, seen = expected[expected > 0], seen[expected > 0]
    chi_square = ((seen - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    # Wilson-Hilferty: chi-square as a normal deviate; 4 standard deviations with a fixed seed never flake.
    deviate = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert abs(deviate) < 4


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_draw_from_all_is_the_inverse_of_the_cumulated_weights(vocab_size: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(vocab_size).normal(0, 2, (1, vocab_size)).astype(np.float32))
    asked = draws(500, 1.0, 0, 1.0, 0.0, vocab_size)
    weights = (logits[0] - logits.max()).exp().double()
    exact = torch.searchsorted(weights.cumsum(0), asked.uniform * weights.sum(), right=True)
    drawn = draw_from_all(logits.expand(500, -1).contiguous(), asked)
    # A threshold within rounding of a border may fall on either side of it.
    assert (drawn != exact).sum() <= 1
    assert ((drawn - exact).abs() <= 1).all()


def test_impossible_tokens_are_never_drawn_at_the_ends() -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 300:302] = 0.0
    asked = draws(2, 1.0, 0, 1.0, 0.0, 600)
    asked.uniform[:] = torch.tensor([0.0, 1 - 2.0**-53])
    assert draw_from_all(logits, asked).tolist() == [300, 301]


def test_uniforms_fill_the_interval_and_never_reach_one() -> None:
    seeds = np.repeat(np.arange(-50, 50), 1000)
    values = uniforms(seeds, np.tile(np.arange(1000), 100))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # 99 degrees of freedom; 99.9 % lie below 149
    assert len(np.unique(values)) == len(values)
    # Neighbouring seeds and positions are uncorrelated.
    grid = values.reshape(100, 1000) - 0.5
    assert abs((grid[1:] * grid[:-1]).mean() * 12) < 0.02
    assert abs((grid[:, 1:] * grid[:, :-1]).mean() * 12) < 0.02
