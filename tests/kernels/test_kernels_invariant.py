"""Products and attention of --deterministic against float32 torch, and the bits of a row in any batch."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import itertools

import triton
import triton.language as tl

from octavo.errors import ConfigError
from octavo.kernels.triton.attention import invariant as invariant_attention
from octavo.kernels.triton.attention.invariant import InvariantAttention, InvariantTile, decode_tiles
from octavo.kernels.triton.attention.paged_prefill import plan_tiles
from octavo.kernels.triton.gemm import invariant as invariant_product
from octavo.kernels.triton.gemm.invariant import Tile, invariant_fp8, invariant_linear, num_shares, share_size
from tests.interpreter import cases
from tests.kernels.test_kernels_paged_prefill import Case, expected, make_step
from tests.kernels.test_kernels_skinny import ACTIVATIONS, HALF, TOLERANCE, distance, make, plain

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def matrix_instructions(monkeypatch, mended_interpreter):
    """Make the interpreter's products order-independent: numpy's order of sums depends on the shape. A matrix instruction takes
    sixteen values of K at a time; summed in float64, so few give the same result in any order."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    def dot(self, a, b, acc, *_):
        one, other = (_wide(part, interpreter) for part in (a, b))
        total = acc.data
        for k in range(0, one.shape[1], 16):
            total = (total + one[:, k : k + 16] @ other[k : k + 16]).astype(np.float32)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _wide(handle, interpreter):
    kind = handle.dtype.scalar
    if kind == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == tl.float8e4nv:
        return torch.from_numpy(handle.data.copy()).view(torch.float8_e4m3fn).double().numpy()
    return handle.data.astype(np.float64)


# ── products ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", cases([1, 16, 17, 70, 128, 129, 300], 1, 17, 130))
@pytest.mark.parametrize("options", ["", "bias norm residual", "gated bias norm"])
def test_product(rows, options, device):
    n, k = 70, 600  # two shares, the second partial
    x, weight = make(rows, 2 * n if "gated" in options else n, k, device)
    bias = torch.randn(len(weight), device=device).to(HALF) if "bias" in options else None
    norm = (torch.randn(k, device=device).to(HALF), 1e-3) if "norm" in options else None
    residual = torch.randn(rows, n, device=device).to(HALF) if "residual" in options else None
    gated = "silu" if "gated" in options else None
    want = plain(x, weight, bias, norm, residual, gated)
    out = invariant_linear(x, weight, bias=bias, norm=norm, residual=residual, gated=gated)
    assert out.shape == (rows, n) and (residual is None or out is residual)
    assert distance(out, want) < 2 * TOLERANCE[HALF]


@pytest.mark.parametrize(("n", "k"), cases([(1024, 3072), (4096, 1024), (70, 4160), (300, 200)], (20, 1060)))
@pytest.mark.parametrize("gated", cases([None, *ACTIVATIONS], None, "silu"))
def test_a_row_has_the_same_bits_in_every_company_and_tile(n, k, gated, device):
    rows = 300 if ON_GPU else 18
    x, weight = make(rows, 2 * n if gated else n, k, device)
    norm = (torch.randn(k, device=device).to(HALF), 1e-6)
    alone = torch.cat([invariant_linear(row, weight, norm=norm, gated=gated) for row in x.split(1 if ON_GPU else 3)])
    for count in cases([2, 17, 33, 64, 65, 128, 129, 300], 17):
        assert torch.equal(invariant_linear(x[:count], weight, norm=norm, gated=gated), alone[:count]), count
    tiles = [Tile(16, 64, 128, 4, 3), Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 2)]
    for tile in cases(tiles, tiles[0], tiles[2]):
        for is_apart in (False, True):
            found = invariant_linear(x, weight, norm=norm, gated=gated, tile=tile, is_apart=is_apart)
            assert torch.equal(found, alone), (tile, is_apart)


def test_8_bit_product(device):
    rows, n, k = 20, 32, 544
    x, weight = torch.randn(rows, k, device=device), torch.randn(n, k, device=device)
    scales, weight_scales = torch.rand(rows, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5
    x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    out = invariant_fp8(x8, scales, weight8, weight_scales, HALF)
    assert distance(out, (x8.float() @ weight8.float().T) * scales * weight_scales) < 4e-3
    one = [invariant_fp8(x8[at : at + 1], scales[at : at + 1], weight8, weight_scales, HALF) for at in range(rows)]
    assert torch.equal(torch.cat(one), out)


def test_shares_are_whole_and_hold_all_of_k():
    for n in (64, 1000, 4096, 151936):
        for k in (16, 300, 1024, 2100, 14336):
            shares = num_shares(n, k)
            size = share_size(k, shares)
            assert shares * size >= k and size % 128 == 0 and (shares == 1 or k // shares >= 256)


def test_unknown_activation_and_no_rows(device):
    x, weight = make(2, 8, 64, device)
    with pytest.raises(ConfigError, match="activation 'swiglu' has no kernel"):
        invariant_linear(x, weight, gated="swiglu")
    assert invariant_linear(x[:0], weight).shape == (0, 8)


# ── attention ───────────────────────────────────────────────────────────────────────────────────────

TILE = InvariantTile(64, 32, 4, 2) if ON_GPU else InvariantTile(16, 16, 4, 1)
KINDS = [{}, {"window": 21}, {"softcap": 5.0}, {"kv_dtype": torch.float8_e4m3fn, "dtype": HALF}]


def attend(case, step, device, sinks=None, num_parts=0, is_decode=False):
    heads, pages, page_table = step
    group = case.heads[0] // case.heads[1]
    out = torch.full((heads.shape[0], case.heads[0] * case.heads[2]), 7.0, dtype=case.dtype, device=device)
    if is_decode:
        tiles = decode_tiles(torch.tensor([sum(row) for row in case.rows], dtype=torch.int32, device=device))
    else:
        counts, lens = [count for _, count in case.rows], [sum(row) for row in case.rows]
        tiles = torch.from_numpy(plan_tiles(counts, lens, 0, TILE.tokens(group))).to(device)
    InvariantAttention(device, 1 << 18).run(
        heads, pages, page_table, tiles, out, TILE, scale=case.heads[2] ** -0.5, window=case.window,
        softcap=case.softcap, sinks=sinks, is_decode=is_decode, num_parts=num_parts,
    )  # fmt: skip
    return out


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Shorten splits, so that rows of a few dozen cells have several."""
    monkeypatch.setattr(invariant_attention, "SPLIT", 32)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_attention(options, device):
    case = Case(((0, 37), (40, 9), (13, 1), (64, 33)), **options)
    step = make_step(case, device, 1)
    want = expected(case, *step)
    assert distance(attend(case, step, device), want) < (4e-3 if case.dtype == HALF else 2e-5)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("has_sinks", cases([False, True], True))
def test_a_token_has_the_same_bits_however_it_comes(options, has_sinks, device):
    """As part of a prompt, as part of a chunk, and alone, by one program or by several."""
    rng, length = random.Random(3), 700 if ON_GPU else 71
    case = Case(((0, length),), **options)
    heads, pages, page_table = make_step(case, device, 2)
    sinks = torch.randn(case.heads[0], device=device) if has_sinks else None
    whole = attend(case, (heads, pages, page_table), device, sinks)
    for _ in range(5 if ON_GPU else 1):
        cuts = sorted({0, length, *(rng.randrange(1, length) for _ in range(3))})
        for first, last in itertools.pairwise(cuts):
            part = Case(((first, last - first),), **options)
            assert torch.equal(attend(part, (heads[first:last], pages, page_table), device, sinks), whole[first:last])
    places = cases([1, 16, 31, 32, 33, 64, 300, 699], 16, 32, 70)
    rows = Case(tuple((at, 1) for at in places), **options)
    together = (heads[places], pages, page_table.repeat(len(places), 1))
    for num_parts in cases((0, 1, 2, 3), 1, 2):
        assert torch.equal(attend(rows, together, device, sinks, num_parts, is_decode=True), whole[places]), num_parts


def test_padding_gives_zeros(device):
    case = Case(((0, 0), (11, 1)))
    heads, pages, page_table = make_step(Case(((0, 1), (11, 1))), device, 5)
    for num_parts in (1, 2):
        out = attend(case, (heads, pages, page_table), device, num_parts=num_parts, is_decode=True)
        assert (out[0] == 0).all() and (out[1] != 0).any()


def test_scratch_that_is_too_small_is_done_without(device):
    assert InvariantAttention(device, 64)._num_parts(4, 8, 8, 4, 64) == 1
    assert InvariantAttention(device, 1 << 16)._num_parts(4, 8, 8, 4, 64) == 8
    assert np.all([invariant_product.choose_tile(rows, False).rows % 16 == 0 for rows in (1, 40, 500)])
