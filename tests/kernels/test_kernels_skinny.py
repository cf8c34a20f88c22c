"""Products with few rows against float32 torch: both kernels, every option, and how they are chosen."""

import os
import re
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.errors import ConfigError
from octavo.kernels.triton.gemm import skinny
from octavo.kernels.triton.gemm.skinny import (
    VECTOR_ROWS,
    choose,
    choose_fp8,
    choose_tile,
    choose_vector,
    few_rows_linear,
    pays,
    pays_fp8,
)
from octavo.kernels.triton.gemm.skinny_tile import TileChoice, tile_product
from octavo.kernels.triton.gemm.skinny_vector import VectorChoice, vector_product
from octavo.kernels.triton.gemm.tall_tile import SCRATCH_NUMBERS, scratch_of
from tests.interpreter import cases

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # half of the last bit: rounded once
HALF = torch.bfloat16
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def make(rows, n, k, device, dtype=HALF):
    torch.manual_seed(rows * n + k)
    x, weight = torch.randn(rows, k, device=device) * 2, torch.randn(n, k, device=device) * k**-0.5
    return x.to(dtype), weight.to(dtype)


def plain(x, weight, bias=None, norm=None, residual=None, gated=None):
    x = x.float()
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm[0].float(), norm[1])
    y = F.linear(x, weight.float(), None if bias is None else bias.float())
    if gated is not None:
        gate, up = y.chunk(2, dim=1)
        y = ACTIVATIONS[gated](gate) * up
    return y if residual is None else y + residual.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("rows", cases([1, 2, 3, 4, 5, 8, 9, 16, 17, 20], 1, 2, 3, 5, 16, 17))
@pytest.mark.parametrize(("n", "k"), [(8, 64), (11, 300)])
def test_plain_product(rows, n, k, device):
    x, weight = make(rows, n, k, device)
    assert distance(few_rows_linear(x, weight), plain(x, weight)) < TOLERANCE[HALF]


@pytest.mark.parametrize("rows", [1, 3, 10])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", ["bias", "norm", "residual", "norm bias residual", "bias residual"])
def test_what_comes_with_the_product(rows, dtype, options, device):
    n, k = 13, 200
    x, weight = make(rows, n, k, device, dtype)
    bias = torch.randn(n, device=device).to(dtype) if "bias" in options else None
    norm = (torch.randn(k, device=device).to(dtype), 1e-3) if "norm" in options else None
    residual = torch.randn(rows, n, device=device).to(dtype) if "residual" in options else None
    expected = plain(x, weight, bias, norm, residual)
    out = few_rows_linear(x, weight, bias=bias, norm=norm, residual=residual)
    assert out.dtype == dtype
    assert distance(out, expected) < TOLERANCE[dtype]
    assert residual is None or out is residual


@pytest.mark.parametrize(
    ("rows", "has_bias"), cases(product([1, 2, 4, 12], [True, False]), (1, True), (4, False), (12, False))
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(rows, name, has_bias, device):
    n, k = 22, 150
    x, weight = make(rows, n, k, device)
    norm = (torch.randn(k, device=device).to(HALF), 1e-6)
    bias = torch.randn(n, device=device).to(HALF) if has_bias else None
    out = few_rows_linear(x, weight, norm=norm, bias=bias, gated=name)
    assert out.shape == (rows, n // 2)
    assert distance(out, plain(x, weight, bias, norm, gated=name)) < 2 * TOLERANCE[HALF]


@pytest.mark.parametrize("rows", cases([1, 2, 7], 1, 7))
@pytest.mark.parametrize("choice", [VectorChoice(4, 1, 1), VectorChoice(8, 1, 3), VectorChoice(2, 2, 2)], ids=str)
@pytest.mark.parametrize("k", [256, 1100])
def test_vector_tiles_ahead_looped_and_written_out(rows, choice, k, device):
    x, weight = make(rows, 10, k, device)
    scale = torch.randn(k, device=device).to(HALF)
    residual = torch.randn(rows, 10, device=device).to(HALF)
    expected = plain(x, weight, norm=(scale, 1e-6), residual=residual)
    vector_product(x, weight, residual, residual, None, (scale, 1e-6), "", choice, False)
    assert distance(residual, expected) < TOLERANCE[HALF]


def test_vector_with_more_tiles_than_are_written_out(device):
    x, weight = make(1, 3, 256 * 18 + 8, device)
    out = torch.empty(1, 3, device=device).to(HALF)
    vector_product(x, weight, out, None, None, None, "", VectorChoice(4, 1, 2), False)
    assert distance(out, plain(x, weight)) < TOLERANCE[HALF]


@pytest.mark.parametrize("split", cases([1, 2, 3, 8], 1, 3, 8))
@pytest.mark.parametrize("gated", ["", "silu"])
@pytest.mark.parametrize(("rows", "k"), [(5, 160), (18, 130)])
def test_tile_split_over_programs(split, gated, rows, k, device):
    n = 36
    x, weight = make(rows, n, k, device)
    bias = torch.randn(n, device=device).to(HALF)
    residual = torch.randn(rows, n // 2 if gated else n, device=device).to(HALF)
    expected = plain(x, weight, bias, residual=residual, gated=gated or None)
    choice = TileChoice(32 if gated else 16, 32, split, 4, 2)
    first = residual.clone()
    tile_product(x, weight, first, first, bias, gated, choice, False)
    assert distance(first, expected) < TOLERANCE[HALF]
    tile_product(x, weight, residual, residual, bias, gated, choice, False)
    assert torch.equal(first, residual), "the next launch finds the scratch as the first did"
    if split > 1:
        assert not scratch_of(x.device)[1].any(), "arrivals are zero again"


def rounded(weight):
    """The weight in 8-bit floats, its scales, and the numbers that they mean."""
    scales = weight.float().abs().amax(1) / 448
    numbers = (weight.float() / scales[:, None]).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * scales[:, None]


@pytest.mark.parametrize("rows", cases([1, 2, 3, 4, 5, 16, 17, 64], 1, 2, 3, 17))
@pytest.mark.parametrize("options", ["", "bias residual", "norm", "norm bias gated"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weights_in_8_bits(rows, options, dtype, device):
    n, k = 38, 544
    x, weight = make(rows, n, k, device, dtype)
    numbers, scales, exact = rounded(weight)
    bias = torch.randn(n, device=device).to(dtype) if "bias" in options else None
    norm = (torch.randn(k, device=device).to(dtype), 1e-3) if "norm" in options else None
    gated = "silu" if "gated" in options else None
    residual = torch.randn(rows, n, device=device).to(dtype) if "residual" in options else None
    expected = plain(x, exact, bias, norm, residual, gated)
    out = few_rows_linear(x, numbers, bias=bias, norm=norm, residual=residual, gated=gated, scales=scales)
    assert out.dtype == dtype and (residual is None or out is residual)
    assert (
        distance(out, expected) < (2 if norm else 1) * TOLERANCE[dtype]
    )  # a tile's norm is rounded before the product


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("gated", ["", "silu"])
def test_tiles_in_8_bits_split_over_programs(split, gated, device):
    rows, n, k = 9, 150, 600
    x, weight = make(rows, n, k, device)
    numbers, scales, exact = rounded(weight)
    out = torch.empty(rows, n // 2 if gated else n, device=device).to(HALF)
    tile_product(x, numbers, out, None, None, gated, TileChoice(128 if gated else 64, 128, split, 4, 3), False, scales)
    assert distance(out, plain(x, exact, gated=gated or None)) < TOLERANCE[HALF]


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_row_knows_nothing_of_the_others(rows, device):
    x, weight = make(rows, 8, 64, device)
    norm = (torch.ones(64, device=device).to(HALF), 1e-6)
    whole = few_rows_linear(x, weight, norm=norm)
    for lost in (0, rows - 1):
        spoilt = x.clone()
        spoilt[lost] = float("nan")
        out = few_rows_linear(spoilt, weight, norm=norm)
        others = [row for row in range(rows) if row != lost]
        assert out[lost].isnan().all()
        assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_rows_of_a_wider_tensor(rows, device):
    wide, weight = make(rows, 9, 96, device)
    part, narrow = wide[:, 32:], weight[:, 32:].contiguous()
    assert distance(few_rows_linear(part, narrow), plain(part, narrow)) < TOLERANCE[HALF]


@pytest.mark.parametrize("rows", [1, 6])
def test_single_precision_stays_so(rows, device):
    x, weight = make(rows, 12, 90, device, torch.float32)
    assert distance(few_rows_linear(x, weight), plain(x.double(), weight.double())) < 1e-5


def test_no_rows(device):
    weight = torch.ones(4, 8, device=device)
    assert few_rows_linear(torch.empty(0, 8, device=device), weight).shape == (0, 4)


def test_names_the_activations_it_has(device):
    with pytest.raises(ConfigError, match="gelu_tanh"):
        few_rows_linear(torch.ones(1, 8, device=device), torch.ones(4, 8, device=device), gated="relu")


SHAPES = [(4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False), (151936, 1024, False),
          (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False),
          (7, 5, False), (1, 1, False)]  # fmt: skip


@pytest.mark.parametrize(("n", "k", "is_gated"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16, 33, 64, 128])
def test_choices_fit_the_kernels(n, k, is_gated, rows):
    choice = choose(rows, n, k, is_gated, 132)
    assert isinstance(choice, VectorChoice) if rows == 1 else rows <= VECTOR_ROWS or isinstance(choice, TileChoice)
    vector = choose_vector(min(rows, 8), k)
    tile = choice if isinstance(choice, TileChoice) else choose_tile(rows, n, k, is_gated, 132)
    assert vector.num_warps & (vector.num_warps - 1) == 0 and vector.block_n >= 2 and vector.ahead >= 1
    padded = max(16, 1 << (rows - 1).bit_length())
    num_tiles = -(-n * (2 if is_gated else 1) // tile.block_n)
    assert tile.split == 1 or num_tiles * tile.split * tile.block_n * padded <= SCRATCH_NUMBERS
    # Tiles of W and x in flight, two bytes a value, must fit the 227 KiB of a program.
    assert tile.num_stages * (tile.block_n + padded) * tile.block_k * 2 <= 227 * 1024


@pytest.mark.parametrize(("n", "k", "is_gated"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16, 33, 64])
def test_choices_in_8_bits_fit_the_kernels(n, k, is_gated, rows):
    choice = choose_fp8(rows, n, k, is_gated, 132)
    if isinstance(choice, VectorChoice):
        assert rows <= VECTOR_ROWS and choice.num_warps & (choice.num_warps - 1) == 0
        return
    padded = max(16, 1 << (rows - 1).bit_length())
    num_tiles = -(-n * (2 if is_gated else 1) // choice.block_n)
    assert choice.split == 1 or num_tiles * choice.split * choice.block_n * padded <= SCRATCH_NUMBERS
    assert choice.num_stages * (choice.block_n + 2 * padded) * choice.block_k <= 227 * 1024


def test_weights_in_8_bits_pay_for_few_rows(monkeypatch):
    cpu = torch.device("cpu")
    assert pays_fp8(1, 28672, 4096, cpu) and pays_fp8(64, 4096, 14336, cpu)
    assert not pays_fp8(8, 28672, 4096, cpu) and not pays_fp8(128, 4096, 4096, cpu)
    monkeypatch.setattr(skinny, "can_run", lambda device: True)
    monkeypatch.setattr(skinny, "num_processors", lambda device: 132)
    assert pays_fp8(8, 28672, 4096, cpu) and not pays_fp8(9, 28672, 4096, cpu)


def test_small_weights_are_split_over_the_chip():
    assert choose_tile(16, 1024, 3072, False, 132).split == 8
    assert choose_tile(16, 151936, 1024, False, 132).split == 1


def test_pays_for_one_row_and_not_for_many():
    assert pays(1, 1024, 3072) and pays(1, 28672, 4096)
    assert not pays(256, 1024, 3072) and not pays(256, 28672, 4096)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from octavo.kernels.triton.gemm.skinny_vector import _vector_product as kernel
values = dict(residual=None, bias=None, norm=None, scales=None, K=512, BLOCK_N=4, BLOCK_K=256, AHEAD=2, LOOPED=0, ROWS=1,
              GATED="", PDL=True)
types = dict(x="*bf16", weight="*bf16", out="*bf16", num_rows="i32", n="i32", x_stride="i32", epsilon="fp32")
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if "*" in signature[name]}
source = ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_weights_are_asked_for_before_the_wait_and_x_after_it():
    """Compiled for Hopper, which needs no GPU: the gain of programmatic dependent launch, and the order that makes it correct."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("griddepcontrol.wait")
    loads, stores = (re.compile(rf"^\s*(@%p\d+ )?{name}\.global\b", re.MULTILINE) for name in ("ld", "st"))
    assert len(loads.findall(before)) == 8, "4 rows of 2 tiles, 16 bytes a thread"
    assert "griddepcontrol.launch_dependents" in before
    assert len(loads.findall(after)) == 2 and not stores.search(before) and stores.search(after)
