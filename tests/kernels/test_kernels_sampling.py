"""The sampling kernels against plain Python: the chosen token for every filter, type and kind of broken logits."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.sampling import greedy
from octavo.kernels.triton.sampling import records as columns
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.logit_edits import ban, penalise
from octavo.messages import SamplingParams
from octavo.sampling.randomness import uniforms
from octavo.sampling.state import SamplingState
from tests.sampling.exact import exact

# The interpreter computes with numpy, which warns about -inf times 0; the kernels handle it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def record(vocab_size: int, uniform: float, source: int, target: int, **params: float) -> np.ndarray:
    state = SamplingState(1, vocab_size)
    state.enter(0, SamplingParams(**params), 0, 1, [])
    row = state.records[0].copy()
    row[[columns.SOURCE, columns.TARGET, columns.UNIFORM]] = source, target, uniform
    return row


def drawn(logits: torch.Tensor, records: np.ndarray, device: torch.device, group: int = 4) -> list[int]:
    """Use groups of 4 chunks: then a few thousand logits already take several."""
    out = torch.full((int(records[:, columns.TARGET].max()) + 1,), -1, device=device)
    draw(logits.to(device), torch.from_numpy(records).to(device), out, group=group, num_warps=4)
    return out.tolist()


# ── argmax ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 300, 5000])
def test_argmax_is_the_lowest_of_the_largest(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(np.round(rng.normal(0, 2, (9, vocab_size)))).to(dtype)  # many equal ones
    broken = [torch.nan, -torch.inf, torch.inf, -0.0, 0.0, 3e4]
    for row in range(3, 9):  # most values of a row are one of two
        kinds = torch.tensor([broken[row - 3], broken[int(rng.integers(6))], float(rng.normal())]).to(dtype)
        logits[row] = kinds[torch.from_numpy(rng.choice(3, vocab_size, p=[0.6, 0.38, 0.02]))]
    expected = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).numpy().argmax(-1)
    strided = torch.zeros(9, vocab_size + 3, dtype=dtype, device=device)
    strided[:, :vocab_size] = logits.to(device)
    # Many programs a row; one; and rows with gaps between them.
    for tile, num_programs, given in ((256, 64, logits.to(device)), (256, 9, logits.to(device)), (512, 20, strided)):
        out = torch.full((9,), -1, device=device)
        greedy._launch_argmax(given[:, :vocab_size], out, tile, 4, num_programs)
        assert out.tolist() == expected.tolist()
    assert greedy.argmax(logits.to(device)).tolist() == expected.tolist()
    assert not greedy._counters_on(
        logits.to(device).device
    ).any()  # otherwise the next launch would miss its last program


# ── draws ───────────────────────────────────────────────────────────────────────────────────────────


def random_logits(rng: np.random.Generator, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    spread = float(rng.choice([0.1, 1.0, 4.0]))
    logits = rng.normal(rng.choice([-20.0, 0.0, 15.0]), spread, vocab_size)
    match rng.integers(5):
        case 0:
            logits = np.round(logits)  # many equal ones
        case 1:
            logits[rng.integers(vocab_size, size=vocab_size // 3)] = rng.choice([np.nan, -np.inf, -3e38])
        case 2:
            logits[rng.integers(vocab_size, size=3)] = rng.choice([np.inf, 30.0])
    return torch.from_numpy(logits.astype(np.float32)).to(dtype)


def random_params(rng: np.random.Generator, vocab_size: int) -> dict[str, float]:
    return {
        "temperature": float(rng.choice([0.0, 1e-4, 0.3, 1.0, 1.0, 2.0, 100.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, 50, vocab_size // 2, vocab_size - 1])) % vocab_size,
        "top_p": float(rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999])),
        "min_p": float(rng.choice([0.0, 0.0, 0.001, 0.1, 1.0])),
    }


@pytest.mark.parametrize("vocab_size", [37, 300, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_follow_the_filters(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng([vocab_size, DTYPES.index(dtype)])
    cases, logits, records = [], [], []
    while len(cases) < 13:
        row, params = random_logits(rng, vocab_size, dtype), random_params(rng, vocab_size)
        expected = exact(row.float().numpy(), **params)
        if expected.is_clear:
            uniform = float(rng.choice([rng.random(), 0.0, 1 - 2.0**-53]))
            records.append(record(vocab_size, uniform, source=len(cases), target=len(cases), **params))
            cases.append((expected, uniform, params))
            logits.append(row)
    assert len({tuple(params.values()) for _, _, params in cases}) > 9
    tokens = drawn(torch.stack(logits), np.stack(records), device)
    for token, (expected, uniform, params) in zip(tokens, cases, strict=True):
        assert expected.allows(token, uniform), (token, uniform, params)


FILTERS = [
    {},
    {"temperature": 0.5, "min_p": 0.05},
    {"top_k": 7},
    {"top_p": 0.8},
    {"temperature": 2.0, "top_k": 25, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_evenly_spread_uniforms_give_each_token_its_share(params: dict[str, float], device: torch.device) -> None:
    vocab_size, num_draws = 600, 20
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, vocab_size).astype(np.float32))
    expected = exact(logits.numpy(), **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params})
    assert expected.is_clear
    records = [record(vocab_size, (i + 0.5) / num_draws, 0, i, **params) for i in range(num_draws)]
    tokens = drawn(logits[None], np.stack(records), device)
    assert tokens == sorted(tokens)  # vocabulary order
    counts = np.array([tokens.count(token) for token in expected.kept])
    assert counts.sum() == num_draws  # no filtered token was drawn
    assert (np.abs(counts - expected.shares * num_draws) < 1 + 1e-4).all()


def test_seeded_draws_follow_the_exact_distribution(device: torch.device) -> None:
    vocab_size, num_draws = 12, 200
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1, vocab_size).astype(np.float32))
    wanted = exact(logits.numpy(), 0.9, 0, 1.0, 0.0).shares * num_draws
    values = uniforms(np.full(num_draws, 77), np.arange(num_draws))
    records = np.stack([record(vocab_size, values[i], 0, i, temperature=0.9) for i in range(num_draws)])
    counts = np.bincount(drawn(logits[None], records, device), minlength=vocab_size)
    chi_square, degrees = ((counts - wanted) ** 2 / wanted).sum(), vocab_size - 1
    # Wilson-Hilferty: chi-square as a normal deviate; with a fixed seed 3 standard deviations never flake.
    deviate = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert abs(deviate) < 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equals_at_the_cut_the_lowest_ids_stay(dtype: torch.dtype, device: torch.device) -> None:
    vocab_size = 3000
    logits = torch.full((2, vocab_size), -3.0, dtype=dtype)
    equals = torch.arange(40, vocab_size, 70)  # 43 of them, in many chunks
    logits[:, equals] = torch.tensor([1.5, -0.0], dtype=dtype)[:, None]
    logits[1, equals[::2]] = 0.0  # equal to -0
    logits[:, 2500] = 2.0
    top = 1 - 2.0**-53
    records = []
    for source, params, uniform in (
        (0, {"top_k": 11}, 0.0), (0, {"top_k": 11}, top), (1, {"top_k": 30}, top),
        (1, {"top_p": 0.5, "temperature": 0.5}, top), (1, {"top_k": 43, "top_p": 0.99, "min_p": 0.1}, top),
    ):  # fmt: skip
        records.append(record(vocab_size, uniform, source, len(records), **params))
    tokens = drawn(logits, np.stack(records), device)
    # Of 11 the largest, at 2500, is one: ten equals stay. Of 43, 42 equals do, and 0.99 of their mass needs all of them.
    assert tokens[:2] == [40, 2500]
    kept = [exact(logits[1].float().numpy(), 1.0, 30, 1.0, 0.0), exact(logits[1].float().numpy(), 0.5, 0, 0.5, 0.0)]
    assert tokens[2:4] == [max(each.kept) for each in kept]
    assert tokens[4] == equals[41]


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_infinite_logits_are_equals(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.zeros((1, 300), dtype=dtype)
    logits[0, [20, 100, 290]] = torch.inf
    ways = [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9, "min_p": 1.0}, {"temperature": 0.0}]
    records = [record(300, 1 - 2.0**-53, 0, i, **params) for i, params in enumerate(ways)]
    assert drawn(logits, np.stack(records), device) == [290, 100, 100, 100, 20]


def test_a_row_gets_the_same_token_whatever_is_drawn_beside_it(device: torch.device) -> None:
    rng = np.random.default_rng(11)
    vocab_size, num_rows = 2000, 8
    logits = torch.stack([random_logits(rng, vocab_size, torch.bfloat16) for _ in range(num_rows)])
    records = np.stack(
        [record(vocab_size, rng.random(), i, i, **random_params(rng, vocab_size)) for i in range(num_rows)]
    )
    together = drawn(logits, records, device)
    order = rng.permutation(num_rows)
    assert drawn(logits, records[order], device) == together
    for row in range(num_rows):
        alone = records[row].copy()
        alone[[columns.SOURCE, columns.TARGET]] = 0
        # The result does not depend on how the work is divided: integer masses are added, in any order.
        assert drawn(logits[row : row + 1], alone[None], device, group=8) == [together[row]]


# ── edits ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_follow_their_formula_and_leave_the_logits_alone(dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(2)
    vocab_size, width = 50, 1300
    tokens = torch.from_numpy(rng.integers(0, vocab_size, (4, width)).astype(np.int32))
    logits = torch.from_numpy(rng.normal(0, 2, (3, vocab_size))).to(dtype)
    records = np.zeros((2, columns.WIDTH))
    # table row, row of logits, prompt, length (more than a program takes), repetition, frequency, presence
    records[0, :7] = [3, 2, 5, 9, 1.3, 0.25, -0.5]
    records[1, :7] = [1, 0, 30, width, 0.8, -0.001, 0.7]
    before = logits.clone()
    wide = penalise(
        logits.to(device), tokens.to(device), torch.from_numpy(records).to(device), 30, width - 30, has_frequency=True
    )
    for row, wanted in zip(wide.cpu().double(), records, strict=True):
        held = tokens[int(wanted[0])].tolist()
        prompt, output = held[: int(wanted[2])], held[int(wanted[2]) : int(wanted[3])]
        for token, value in enumerate(logits[int(wanted[1])].double().tolist()):
            if token in prompt or token in output:
                value = value / wanted[4] if value > 0 else value * wanted[4]
            count = output.count(token)
            value -= wanted[5] * count + wanted[6] * (count > 0)
            assert row[token] == pytest.approx(value, rel=1e-5, abs=1e-5)
    assert torch.equal(logits, before)


def test_bans_hit_their_places_only(device: torch.device) -> None:
    logits = torch.arange(60.0).view(3, 20).to(torch.bfloat16).to(device)
    ban(logits, torch.tensor([0.0, 25.0, 59.0], dtype=torch.float64, device=device))
    expected = torch.arange(60.0)
    expected[[0, 25, 59]] = -torch.inf
    assert torch.equal(logits.flatten().float().cpu(), expected)
