"""Native sampling against exact arithmetic, and against itself with other instruction sets, threads and batches."""

import numpy as np
import pytest
import torch

from octavo.kernels.cpu.build import NoCompiler, library_path
from octavo.kernels.cpu.library import BadCall, Threads, use_isa
from octavo.kernels.cpu.library import isa as chosen_isa
from octavo.kernels.cpu.sampling import Records, choose, fill_uniforms, new_records
from octavo.messages import SamplingParams
from octavo.sampling import penalties
from octavo.sampling.randomness import uniforms
from octavo.sampling.state import SamplingState
from tests.native import ISAS
from tests.sampling.exact import exact

try:
    library_path()
except NoCompiler as missing:
    pytest.skip(str(missing), allow_module_level=True)

BROKEN = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-40], dtype=np.float32)


@pytest.fixture(scope="module")
def pools():
    made = [Threads(num) for num in (1, 2, 3)]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture(params=ISAS)
def isa(request, pools):
    before = chosen_isa()
    if not use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    use_isa(before)


def records_of(
    uniforms: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Records:
    records = new_records(len(uniforms))
    records["uniform"], records["temperature"] = uniforms, temperature
    records["top_k"], records["top_p"], records["min_p"] = top_k, top_p, min_p
    return records


def tokens_of(pool: Threads, logits: np.ndarray, records: Records) -> list[int]:
    """logits: [V], the same for every record, or [S, V]."""
    rows = torch.from_numpy(np.broadcast_to(logits, (len(records), logits.shape[-1])).copy())
    chosen = torch.full((len(records),), -1)
    choose(pool, rows, records, chosen)
    return chosen.tolist()


def random_logits(rng: np.random.Generator) -> np.ndarray:
    size = int(rng.choice([1, 2, 40, 255, 256, 257, 1000, 5000]))
    logits = rng.normal(0, rng.choice([0.1, 1.0, 3.0, 10.0]), size).astype(np.float32)
    match rng.integers(6):
        case 0:
            return np.round(logits)  # many equal logits
        case 1:
            return np.full(size, logits[0])
        case 2:
            where = rng.random(size) < rng.choice([0.01, 0.5, 1.0])
            logits[where] = rng.choice(BROKEN, int(where.sum()))
    return logits


def random_limits(rng: np.random.Generator, size: int) -> tuple[float, int, float, float]:
    temperature = float(rng.choice([1e-5, 0.01, 0.3, 1.0, 2.0, 100.0]))
    top_k = int(rng.choice([0, 0, 1, 2, 40, size // 2, size - 1, size, rng.integers(1, size + 1)]))
    top_p = float(rng.choice([1.0, 1.0, 0.999999, 0.99, 0.9, 0.5, 0.01, 1e-9]))
    min_p = float(rng.choice([0.0, 0.0, 0.001, 0.05, 0.5, 1.0]))
    return temperature, min(top_k, size), top_p, min_p


def test_tokens_are_those_of_exact_arithmetic(isa, pools) -> None:
    print("seed 11")
    rng = np.random.default_rng(11)
    num_clear = 0
    for _ in range(400):
        logits = random_logits(rng)
        limits = random_limits(rng, len(logits))
        uniforms = rng.random(6)
        expected = exact(logits, float(np.float32(limits[0])), *limits[1:])
        found = tokens_of(pools[1], logits, records_of(uniforms, *limits))
        assert all(0 <= token < len(logits) for token in found)
        if expected.is_clear:
            num_clear += 1
            for token, uniform in zip(found, uniforms, strict=True):
                assert expected.allows(token, uniform, slack=1e-6), (limits, uniform, token)
    assert num_clear > 250


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_large_vocabularies(isa, pools, spread: float) -> None:
    """The two ways to find a filter's border: few tokens above it, or most of them."""
    rng = np.random.default_rng(12)
    logits = rng.normal(0, spread, 30_011).astype(np.float32)
    uniforms = rng.random(8)
    for limits in (
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 0.999, 0.0),
        (1.0, 40, 0.9, 0.0),
        (0.7, 9000, 0.95, 1e-4),
        (1.0, 25_000, 1.0, 0.0),
    ):
        expected = exact(logits, float(np.float32(limits[0])), *limits[1:])
        found = tokens_of(pools[1], logits, records_of(uniforms, *limits))
        assert all(expected.allows(token, u, slack=1e-6) for token, u in zip(found, uniforms, strict=True)), limits


def test_both_ends_of_what_is_kept_can_be_drawn(isa, pools) -> None:
    logits = np.zeros(5000, dtype=np.float32)
    ends = np.array([0.0, 1 - 2.0**-53])
    for limits, expected in (
        ((1.0, 0, 1.0, 0.0), [0, 4999]),
        ((1.0, 1200, 1.0, 0.0), [0, 1199]),  # of equal logits the lowest ids
        ((1.0, 4700, 1.0, 0.0), [0, 4699]),
        ((1.0, 0, 0.5, 0.0), [0, 2499]),
        ((1.0, 1000, 0.5, 0.0), [0, 499]),
        ((1.0, 0, 0.50001, 0.0), [0, 2500]),  # the token that crosses is kept
        ((1.0, 0, 1e-12, 0.0), [0, 0]),
    ):
        assert tokens_of(pools[0], logits, records_of(ends, *limits)) == expected
    logits[:] = -np.inf
    logits[[300, 301]] = 0.0
    assert tokens_of(pools[0], logits, records_of(ends, 1.0)) == [300, 301]


def test_every_instruction_set_and_pool_chooses_the_same(pools) -> None:
    print("seed 13")
    rng = np.random.default_rng(13)
    before = chosen_isa()
    try:
        for _ in range(60):
            logits = random_logits(rng)
            records = records_of(rng.random(200), *random_limits(rng, len(logits)))
            found = [
                tokens_of(pool, logits, records)
                for name in ISAS
                if use_isa(name)
                for pool in (pools if name == "portable" else pools[:1])
            ]
            assert all(other == found[0] for other in found)
    finally:
        use_isa(before)


def test_a_row_gets_the_same_token_whatever_runs_beside_it(isa, pools) -> None:
    rng = np.random.default_rng(14)
    logits = rng.normal(0, 2, (24, 3000)).astype(np.float32)
    logits[3, :100], logits[7, 50], logits[9] = np.nan, np.inf, -np.inf
    records = new_records(24)
    for i in range(24):
        records[i : i + 1] = records_of(rng.random(1), *random_limits(rng, 3000))
    records["is_greedy"][::5] = 1
    together = tokens_of(pools[2], logits, records)
    assert together == [tokens_of(pools[0], logits[i], records[i : i + 1])[0] for i in range(24)]
    assert together == tokens_of(pools[1], logits[::-1], records[::-1].copy())[::-1]


@pytest.mark.parametrize("size", [1, 5, 256, 1003, 49152])
def test_greedy_takes_the_first_of_the_largest(isa, pools, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(rng.normal(0, 3, (9, size))).astype(np.float32)
    logits[1], logits[2, size // 2], logits[3, -1], logits[4] = -np.inf, np.nan, np.inf, np.nan
    logits[5] = np.where(np.arange(size) % 3 == 1, 3.4028235e38, np.nan)
    logits[5, -1] = np.inf  # above the largest number
    records = new_records(9)
    records["is_greedy"] = 1
    assert tokens_of(pools[1], logits, records) == [
        int(np.argmax(np.nan_to_num(row, nan=-np.inf, posinf=np.inf))) for row in logits
    ]


def test_a_border_that_rounded_sums_misplace_is_found_all_the_same(isa, pools) -> None:
    """A float32 sum loses terms far smaller than itself: here the lane of the likeliest token loses its others."""
    logits = np.full(65_536, -40 * np.log(2.0), dtype=np.float32)
    logits[:48_000] = -25 * np.log(2.0)
    logits[0] = 0.0
    weights = np.exp(logits.astype(np.float64))
    for share in np.linspace(0.0, 1.0, 12):  # of the first of the two bands
        top_p = float((1.0 + share * weights[1:48_000].sum()) / weights.sum())
        expected = exact(logits, 1.0, 0, top_p, 0.0)
        found = tokens_of(pools[0], logits, records_of(np.array([1 - 2.0**-53]), 1.0, 0, top_p))
        assert abs(found[0] - expected.kept[-1]) <= 40


def test_penalties_change_the_logits_as_torch_does(isa, pools) -> None:
    print("seed 15")
    rng = np.random.default_rng(15)
    for _ in range(20):
        params = SamplingParams(
            temperature=0.0,
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.3, -1.1])),
            presence_penalty=float(rng.choice([0.0, 0.7, -2.0])),
        )
        state = SamplingState(4, 300)
        logits = torch.from_numpy(rng.normal(0, 2, (4, 300)).astype(np.float32))
        logits[1, :40] = -torch.inf
        tokens = torch.from_numpy(rng.integers(0, 300, (4, 60)).astype(np.int32))
        rows, lens = np.array([3, 0, 2, 1]), rng.integers(20, 61, 4)
        for row in range(4):
            state.enter(row, params, 0, int(rng.integers(1, 21)), [])
        expected = logits.clone()
        penalties.apply(expected, tokens, state, np.arange(4), rows, lens)
        records = new_records(4)
        records["is_greedy"], records["len"], records["prompt_len"] = 1, lens, state.prompt_len[rows]
        records["tokens"] = tokens.data_ptr() + rows * tokens.stride(0) * 4
        for name in ("repetition", "frequency", "presence"):
            records[name] = getattr(state, name)[rows]
        chosen = torch.full((4,), -1)
        for _ in range(2):  # a row's counts are cleared before the next row
            changed = logits.clone()
            choose(pools[1], changed, records, chosen)
            assert torch.equal(changed, expected)
            assert chosen.tolist() == expected.argmax(-1).tolist()


NUM_ALLOWED = (
    1,
    2,
    33,
    64,
    4095,
    4096,
    4097,
    9000,
)  # of up to 4096, the tokens are listed; else the others become -inf


def test_a_mask_is_the_same_as_no_logits_for_the_tokens_that_it_bans(isa, pools) -> None:
    rng = np.random.default_rng(19)
    for number, num_allowed in enumerate(NUM_ALLOWED * 3):
        size = int(rng.choice([9000, 9024, 9031]))
        is_allowed = np.zeros(-(-size // 32) * 32, dtype=bool)
        is_allowed[rng.choice(size, num_allowed, replace=False)] = True
        bits = np.packbits(is_allowed, bitorder="little").view(np.uint32).copy()
        bits[-1] |= np.uint32(
            (0xFFFFFFFF << size % 32) & 0xFFFFFFFF if size % 32 else 0
        )  # no tokens: they do not count
        logits = rng.normal(0, 3, size).astype(np.float32)
        if number % 3 == 1:
            logits = np.round(logits)
        where = rng.random(size) < 0.3 * (number % 3 == 2)
        logits[where] = rng.choice(BROKEN, int(where.sum()))
        logits[rng.choice(np.flatnonzero(is_allowed))] = 1.5
        banned = np.where(is_allowed[:size], logits, -np.inf).astype(np.float32)
        for limits in [
            (1.0, 0, 1.0, 0.0),
            (0.7, 5, 1.0, 0.0),
            (2.0, 0, 0.8, 0.0),
            (1.0, 700, 0.9, 0.01),
            (0.0, 0, 1.0, 0.0),
        ]:
            records = records_of(np.linspace(0, 1, 40, endpoint=False), *limits)
            records["is_greedy"] = limits[0] == 0
            expected = tokens_of(pools[1], banned, records)
            records["mask"] = bits.ctypes.data
            found = tokens_of(pools[1], logits, records)
            assert found == expected and all(is_allowed[found])


def test_of_tokens_that_are_all_excluded_a_mask_still_leaves_one_of_its_own(isa, pools) -> None:
    logits = np.zeros(9000, dtype=np.float32)
    for ids in (np.arange(40, 60), np.arange(40, 6000)):
        is_allowed = np.zeros(9024, dtype=bool)
        is_allowed[ids] = True
        bits = np.packbits(is_allowed, bitorder="little").view(np.uint32)
        for excluded in (-np.inf, np.nan):
            logits[ids] = excluded
            records = records_of(np.linspace(0, 1, 20, endpoint=False), 1.0)
            records["mask"] = bits.ctypes.data
            assert tokens_of(pools[1], logits, records) == [int(ids[int(at)]) for at in np.arange(20) * len(ids) / 20]
            records["is_greedy"] = 1
            assert {*tokens_of(pools[1], logits, records)} == {40}


def test_uniforms_are_those_of_the_other_samplers() -> None:
    rng = np.random.default_rng(17)
    seeds = np.concatenate((rng.integers(-(2**63), 2**63 - 1, 1000), [0, 1, -1, 2**63 - 1, -(2**63)]))
    positions = np.concatenate((rng.integers(0, 2**20, 1000), [0, 1, 2, 3, 2**40]))
    records = new_records(len(seeds))
    fill_uniforms(records, seeds, positions)
    assert np.array_equal(records["uniform"], uniforms(seeds, positions))


def test_a_record_that_says_nonsense_still_gives_an_id(isa, pools) -> None:
    rng = np.random.default_rng(16)
    nonsense = [np.nan, np.inf, -np.inf, -1.0, 0.0, 0.5, 2.0, 1e-45, 3e38]
    records = new_records(500)
    for name in ("uniform", "temperature", "top_p", "min_p"):
        records[name] = rng.choice(nonsense, 500).astype(records[name].dtype)
    records["top_k"] = rng.choice([-5, 0, 1, 699, 700, 2**40, -(2**63)], 500)
    for logits in (rng.normal(0, 2, 700).astype(np.float32), rng.choice(BROKEN, 700)):
        assert all(0 <= token < 700 for token in tokens_of(pools[1], logits, records))


def test_tensors_that_do_not_fit_are_refused(pools) -> None:
    logits, records, chosen = torch.zeros(2, 8), new_records(2), torch.zeros(2, dtype=torch.int64)
    for bad in ((logits.half(), records, chosen), (logits.t(), records, chosen), (logits, records[:1], chosen),
                (logits, records, chosen[:1]), (logits, records, chosen.int()), (logits[:, :0], records, chosen)):  # fmt: skip
        with pytest.raises(BadCall):
            choose(pools[0], *bad)
    choose(pools[0], logits[:0], records[:0], chosen[:0])
    for columns in (
        (np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
    ):
        with pytest.raises(BadCall):
            fill_uniforms(records, *columns)
