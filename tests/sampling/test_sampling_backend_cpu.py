"""The sampler by a CPU's native kernels: the same tokens as torch's sampler, for all options."""

from functools import partial

import numpy as np
import pytest
import torch

from octavo.kernels.cpu.build import NoCompiler, library_path
from octavo.kernels.cpu.native import Native
from octavo.messages import SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from tests.sampling.test_sampling_sampler import EVERY_WAY, VOCAB, random_state, sample_every_way

try:
    library_path()
except NoCompiler as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module", params=[1, 2])
def native(request):
    made = Native(request.param)
    yield made
    made.threads.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_choose_what_torch_chooses(native, dtype) -> None:
    print("seeds 0 to 29")
    for seed in range(30):
        rng = np.random.default_rng(seed)
        state, tokens, lens = random_state(rng, 16)
        logits = torch.from_numpy(rng.normal(0, 3, (16, VOCAB))).to(dtype)
        if seed % 3 == 0:
            logits = logits.round()  # many equal logits
        rows = rng.permutation(16)
        expected = sample(logits.clone(), tokens, state, rows, lens[rows])
        assert torch.equal(sample(logits.clone(), tokens, state, rows, lens[rows], native=native), expected)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_large_vocabulary(native, spread: float) -> None:
    vocab_size, rng = 49_152, np.random.default_rng(3)
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(top_p=0.99, min_p=0.001),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_k=30_000, repetition_penalty=1.2),
    ]
    state = SamplingState(len(asked), vocab_size)
    for row, params in enumerate(asked):
        state.enter(row, params, row, 5, [])
    logits = torch.from_numpy(rng.normal(0, spread, (len(asked), vocab_size)).astype(np.float32))
    tokens = torch.from_numpy(rng.integers(0, vocab_size, (len(asked), 64)).astype(np.int32))
    for length in range(20, 24):
        rest = tokens, state, np.arange(len(asked)), np.full(len(asked), length)
        assert torch.equal(sample(logits.clone(), *rest, native=native), sample(logits.clone(), *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_logits_give_a_token_and_touch_nobody_else(native, dtype) -> None:
    way = partial(sample, native=native)
    for value in (torch.nan, -torch.inf):
        assert sample_every_way(torch.full((VOCAB,), value), dtype, way) == [0] * len(EVERY_WAY)
    logits = torch.linspace(-5, 5, VOCAB)
    logits[[5, 650, 699]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert sample_every_way(logits, dtype, way) == [650] * len(EVERY_WAY)


def test_stop_ids_are_banned_until_min_tokens_are_out(native) -> None:
    state = SamplingState(3, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0, min_tokens=3), 0, 5, [7, 9, VOCAB + 3])
    state.enter(1, SamplingParams(temperature=0.0, min_tokens=3), 0, 5, [])
    state.enter(2, SamplingParams(temperature=0.0, min_tokens=3, presence_penalty=-2.0), 0, 5, [7])
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 11] = 3.0, 2.0, 1.0
    tokens = torch.full((3, 16), 7, dtype=torch.int32)  # a banned token stays banned, however much a penalty favours it
    for length, expected in ((5, [11, 7, 9]), (7, [11, 7, 9]), (8, [7, 7, 7])):
        result = sample(logits.clone(), tokens, state, np.arange(3), np.full(3, length), native=native)
        assert result.tolist() == expected


def test_the_given_tensor_is_filled_and_logits_of_plain_rows_stay(native) -> None:
    state = SamplingState(2, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
    state.enter(1, SamplingParams(top_p=0.5), 0, 1, [])
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (2, VOCAB)).astype(np.float32))
    before, out = logits.clone(), torch.full((2,), -1)
    table = torch.zeros(2, 4, dtype=torch.int32)
    assert sample(logits, table, state, np.arange(2), np.ones(2, dtype=np.int64), out=out, native=native) is out
    assert torch.equal(logits, before)
    assert out[0] == logits[0].argmax() and 0 <= out[1] < VOCAB
