"""The sampler as the worker calls it: batch mates, greedy rows, penalties, bans."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState

VOCAB = 700


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        top_k=int(rng.choice([0, 0, 5, 300])),
        top_p=float(rng.choice([1.0, 0.5, 0.95])),
        min_p=float(rng.choice([0.0, 0.1])),
        presence_penalty=float(rng.choice([0.0, 0.7])),
        frequency_penalty=float(rng.choice([0.0, -0.4])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        max_tokens=64,
        min_tokens=int(rng.choice([0, 20])),
    )


def random_state(rng: np.random.Generator, num_rows: int) -> tuple[SamplingState, torch.Tensor, np.ndarray]:
    state = SamplingState(num_rows, VOCAB)
    for row in range(num_rows):
        stop_ids = rng.integers(0, VOCAB + 50, 3).tolist()  # some beyond the vocabulary
        state.enter(row, random_params(rng), int(rng.integers(-(2**63), 2**63 - 1)), int(rng.integers(1, 10)), stop_ids)
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (num_rows, 40)).astype(np.int32))
    return state, tokens, rng.integers(10, 40, num_rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_row_gets_the_same_token_whatever_runs_beside_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, tokens, lens = random_state(rng, 12)
    logits = torch.from_numpy(rng.normal(0, 3, (12, VOCAB)).astype(np.float32))
    together = sample(logits.clone(), tokens, state, np.arange(12), lens)
    order = rng.permutation(12)
    shuffled = sample(logits[order], tokens, state, order, lens[order])
    assert shuffled.tolist() == together[order].tolist()
    for row in range(12):
        alone = sample(logits[row : row + 1].clone(), tokens, state, np.array([row]), lens[row : row + 1])
        assert alone.item() == together[row].item()


def direct_penalties(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    result = logits.astype(np.float64).copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            r = params.repetition_penalty
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5, -2.0]),
    st.sampled_from([0.0, 0.25, -1.0]),
    st.sampled_from([1.0, 1.2, 0.8]),
)
def test_penalties_follow_their_formula(seed: int, presence: float, frequency: float, repetition: float) -> None:
    from octavo.sampling import penalties

    rng = np.random.default_rng(seed)
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, temperature=0.0
    )
    state = SamplingState(4, 30)
    tokens = torch.from_numpy(rng.integers(0, 30, (4, 20)).astype(np.int32))
    logits = rng.normal(0, 2, (3, 30)).astype(np.float32)
    rows, lens, prompt_lens = np.array([3, 0, 2]), rng.integers(5, 21, 3), rng.integers(1, 6, 3)
    lens = np.maximum(lens, prompt_lens)  # a row may have no output yet
    for row, prompt_len in zip(rows, prompt_lens, strict=True):
        state.enter(int(row), params, 0, int(prompt_len), [])
    changed = torch.from_numpy(logits.copy())
    penalties.apply(changed, tokens, state, np.array([0, 2]), rows[[0, 2]], lens[[0, 2]])
    for i in (0, 2):
        held = tokens[rows[i], : lens[i]].tolist()
        expected = direct_penalties(logits[i], held[: prompt_lens[i]], held[prompt_lens[i] :], params)
        np.testing.assert_allclose(changed[i].numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(changed[1].numpy(), logits[1])


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    state = SamplingState(2, VOCAB)
    params = SamplingParams(temperature=0.0, min_tokens=3)
    state.enter(0, params, 0, 5, [7, 9, VOCAB + 3])
    state.enter(1, params, 0, 5, [])
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 11] = 3.0, 2.0, 1.0
    tokens = torch.zeros(2, 16, dtype=torch.int32)
    for length, expected in ((5, 11), (7, 11), (8, 7)):
        result = sample(logits.clone(), tokens, state, np.array([0, 1]), np.array([length, length]))
        assert result.tolist() == [expected, 7]


def test_greedy_takes_the_lowest_of_equals_in_every_type() -> None:
    state = SamplingState(1, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(1, VOCAB, dtype=dtype)
        logits[0, [40, 60]] = 2.0
        assert sample(logits, torch.zeros(1, 4, dtype=torch.int32), state, np.array([0]), np.array([1])).item() == 40


def test_a_row_forgets_its_last_occupant() -> None:
    state = SamplingState(1, VOCAB)
    state.enter(0, SamplingParams(top_k=3, top_p=0.1, min_p=0.2, presence_penalty=1.0, min_tokens=4), 1, 3, [1])
    state.enter(0, SamplingParams(), 2, 6, [])
    assert not state.greedy[0]
    assert not state.penalised[0]
    assert (state.top_k[0], state.top_p[0], state.min_p[0], state.min_len[0]) == (VOCAB, 1.0, 0.0, 6)
    assert len(state.stop_ids[0]) == 0


EVERY_WAY = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_k=600),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.3),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.0, repetition_penalty=0.7),
)


def sample_every_way(
    logits: list[float] | torch.Tensor, dtype: torch.dtype = torch.float32, sample: Callable[..., torch.Tensor] = sample
) -> list[int]:
    """The same logits [V] for a row of each kind, with a sound row between any two."""
    num = len(EVERY_WAY)
    state = SamplingState(num, VOCAB)
    for row, params in enumerate(EVERY_WAY):
        state.enter(row, params, row, 1, [])
    tokens = torch.zeros(num, 4, dtype=torch.int32)
    tokens[:] = torch.tensor([1, 0, 3, 650])
    sound = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (num, VOCAB))).to(dtype)
    lens = np.full(num, 4)
    alone = sample(sound.clone(), tokens, state, np.arange(num), lens)
    both = torch.stack((torch.as_tensor(logits).expand(num, VOCAB).to(dtype), sound), dim=1).flatten(0, 1)
    result = sample(both, tokens, state, np.arange(num).repeat(2), lens.repeat(2))
    assert torch.equal(result[1::2], alone)  # the sound rows are not affected
    return result[::2].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_without_a_number_gets_token_0(value: float, dtype: torch.dtype) -> None:
    assert sample_every_way(torch.full((VOCAB,), value), dtype) == [0] * len(EVERY_WAY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_logits_count_as_impossible_and_infinite_ones_as_certain(dtype: torch.dtype) -> None:
    logits = torch.full((VOCAB,), torch.nan)
    logits[[3, 650]] = torch.tensor([-3e38, 2.0])
    assert sample_every_way(logits, dtype) == [650] * len(EVERY_WAY)
    logits = torch.linspace(-5, 5, VOCAB)
    logits[[5, 650, 699]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert sample_every_way(logits, dtype) == [650] * len(EVERY_WAY)


def test_any_mix_of_broken_logits_gives_an_id_of_the_vocabulary() -> None:
    print("seed 8")
    rng = np.random.default_rng(8)
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, 1.0], dtype=np.float32)
    for _ in range(50):
        shares = rng.dirichlet(np.full(len(values), 0.2))  # most values of a row are of one or two kinds
        logits = torch.from_numpy(rng.choice(values, VOCAB, p=shares))
        possible = {i for i, x in enumerate(logits.tolist()) if x > -np.inf} or {0}
        assert set(sample_every_way(logits)) <= possible


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(0, 3, (1, VOCAB)).astype(np.float32))
    for temperature in (5e-324, 1e-46, 1e-40, 1e-20, 9e-6, 1e-5, 1e-4):
        for params in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
            state = SamplingState(1, VOCAB)
            state.enter(0, SamplingParams(temperature=temperature, **params), 3, 1, [])
            assert state.greedy[0] == (temperature < 1e-5)
            found = sample(logits.clone(), torch.zeros(1, 4, dtype=torch.int32), state, np.array([0]), np.array([1]))
            assert found.item() == logits.argmax().item()
