"""The sampler by kernels, as a GPU runs it: the same tokens as the CPU's sampler, for all options."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.messages import SamplingParams
from octavo.sampling.backends import triton
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState
from tests.interpreter import mend
from tests.sampling.test_sampling_sampler import EVERY_WAY, VOCAB, random_state, sample_every_way

# The interpreter computes with numpy, which warns about -inf times 0; the kernels handle it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    mend(monkeypatch)


def sample_there(device: torch.device, logits: torch.Tensor, tokens: torch.Tensor, *rest) -> torch.Tensor:
    return sample(logits.to(device), tokens.to(device), *rest, by_kernels=True).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_choose_what_the_cpu_chooses(dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(1)
    state, tokens, lens = random_state(rng, 16)
    logits = torch.from_numpy(rng.normal(0, 3, (16, VOCAB))).to(dtype)
    rows = np.arange(16)
    expected = sample(logits.clone(), tokens, state, rows, lens)
    assert torch.equal(sample_there(device, logits, tokens, state, rows, lens), expected)


def test_plain_torch_serves_wherever_the_logits_are(device: torch.device) -> None:
    """As on a GPU without Triton: the CPU's tokens, computed on the logits' device."""
    rng = np.random.default_rng(2)
    state, tokens, lens = random_state(rng, 16)
    logits, rows = torch.from_numpy(rng.normal(0, 3, (16, VOCAB))).float(), np.arange(16)
    expected = sample(logits.clone(), tokens, state, rows, lens)
    there = sample(logits.to(device), tokens.to(device), state, rows, lens, by_kernels=False)
    assert there.device == logits.to(device).device and torch.equal(there.cpu(), expected)


def test_rows_without_penalties_are_sampled_as_they_are(device: torch.device) -> None:
    """A penalised row is widened to float32 separately: the other rows give the same token as alone, and keep their type."""
    rng = np.random.default_rng(4)
    state = SamplingState(3, VOCAB)
    for row, penalty in enumerate((0.0, 1.5, 0.0)):
        state.enter(row, SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=penalty), row, 2, [])
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (3, 12)).astype(np.int32))
    logits = torch.from_numpy(rng.normal(0, 3, (3, VOCAB))).to(torch.bfloat16).to(device)
    before = logits.clone()
    lens = np.full(3, 12)
    together = sample_there(device, logits, tokens, state, np.arange(3), lens)
    assert torch.equal(logits, before)
    for row in range(3):
        alone = sample_there(device, logits[row : row + 1], tokens, state, np.array([row]), lens[:1])
        assert alone.item() == together[row].item()


def test_stop_ids_are_banned_until_min_tokens_are_out(device: torch.device) -> None:
    state = SamplingState(3, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0, min_tokens=3), 0, 5, [7, 9, VOCAB + 3])
    state.enter(1, SamplingParams(temperature=0.0, min_tokens=3), 0, 5, [])
    state.enter(2, SamplingParams(temperature=0.0, min_tokens=3, presence_penalty=-0.5), 0, 5, [7])
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[:, 7], logits[:, 9], logits[:, 11] = 3.0, 2.0, 1.0
    tokens = torch.full((3, 16), 20, dtype=torch.int32)
    for length, expected in ((5, [11, 7, 9]), (7, [11, 7, 9]), (8, [7, 7, 7])):
        result = sample_there(device, logits.clone(), tokens, state, np.arange(3), np.full(3, length))
        assert result.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_logits_give_a_token_and_touch_nobody_else(dtype: torch.dtype, device: torch.device) -> None:
    way = partial(sample_there, device)
    assert sample_every_way(torch.full((VOCAB,), torch.nan), dtype, way) == [0] * len(EVERY_WAY)
    logits = torch.linspace(-5, 5, VOCAB)
    logits[[5, 650, 699]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert sample_every_way(logits, dtype, way) == [650] * len(EVERY_WAY)


def test_a_greedy_step_sends_nothing_and_fills_the_given_tensor(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a greedy step has nothing to send")

    monkeypatch.setattr(triton, "_send", refuse)
    state = SamplingState(2, VOCAB)
    for row in range(2):
        state.enter(row, SamplingParams(temperature=0.0), 0, 1, [])
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16, device=device)
    logits[0, [40, 60]], logits[1, 9] = 2.0, 1.0
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    out = torch.full((2,), -1, device=device)
    result = sample(logits, table, state, np.arange(2), np.ones(2, dtype=np.int64), out=out, by_kernels=True)
    assert result is out
    assert out.tolist() == [40, 9]


def test_the_given_tensor_is_filled_on_the_cpu_too() -> None:
    state = SamplingState(1, VOCAB)
    state.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 33] = 1.0
    out = torch.full((1,), -1)
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert sample(logits, table, state, np.array([0]), np.array([1]), out=out, by_kernels=False) is out
    assert out.tolist() == [33]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that the mode is a prototype
def test_nothing_waits_for_the_gpu_and_a_graph_repeats_it() -> None:
    rng = np.random.default_rng(6)
    state, tokens, lens = random_state(rng, 20)
    gpu = torch.device("cuda")
    logits = torch.from_numpy(rng.normal(0, 3, (20, VOCAB))).to(torch.bfloat16)
    there, table, out = logits.to(gpu), tokens.to(gpu), torch.zeros(20, dtype=torch.int64, device=gpu)
    rows = np.arange(20)
    sample(there.clone(), table, state, rows, lens)  # the first call compiles
    copy = there.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(copy, table, state, rows, lens, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.tolist() == sample(logits.clone(), tokens, state, rows, lens).tolist()

    greedy = SamplingState(20, VOCAB)
    for row in range(20):
        greedy.enter(row, SamplingParams(temperature=0.0), 0, 1, [])
    sample(there, table, greedy, rows, lens, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(there, table, greedy, rows, lens, out=out)
    for _ in range(3):
        there.copy_(torch.from_numpy(rng.normal(0, 3, (20, VOCAB))))
        graph.replay()
        assert out.tolist() == there.float().argmax(-1).tolist()
