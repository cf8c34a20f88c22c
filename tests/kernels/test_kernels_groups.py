"""Products with weights in groups: every kernel against float32, for every packed type that a GPU holds."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.gemm.groups import MANY_ROWS, choose, group_linear, row_counts
from octavo.kernels.triton.gemm.groups_decode import decoded, looked_up
from octavo.kernels.triton.gemm.groups_few import FewChoice, few_product
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.kernels.triton.gemm.groups_tile import TileChoice, tile_product
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS
from octavo.quants import QUANT, Quants
from octavo.weights.methods.as_groups import GROUP_SIZES, as_groups
from tests.scalar_quants import as_tensor, random_quants

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip
_SCALES |= {"Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}


def quants(type: str, n: int, k: int) -> Quants:
    torch.manual_seed(n + k)
    if type == "FP8":
        numbers = torch.randn(n, k).to(torch.float8_e4m3fn).view(torch.uint8).view(n, -1, 32)
        scales = (torch.rand(n, k // 32, 1) + 0.5).mul_(0.01).view(torch.uint8).view(n, -1, 4)
        return Quants("FP8", torch.cat((scales, numbers), dim=2).flatten(1))
    weights, num_bytes = QUANT[type]
    stored = as_tensor(random_quants(type, n * k // weights, n)).view(n, k // weights, num_bytes)
    for at in _SCALES[type]:
        halves = stored[:, :, at : at + 2].contiguous().view(torch.float16)
        stored[:, :, at : at + 2] = (halves * (0.001 if weights == 256 else 0.01)).view(torch.uint8)
    return Quants(type, stored.flatten(1))


def make(type: str, n: int, k: int, device: torch.device) -> Groups:
    weight = quants(type, n, k)
    found = as_groups(Quants(weight.type, weight.stored.to(device)))
    assert found is not None
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("type", GROUP_SIZES)
def test_what_is_held_is_exact_and_as_large_as_it_says(type: str, device: torch.device) -> None:
    weight, found = quants(type, 6, 512), make(type, 6, 512, device)
    plain = weight.dequantise().to(device)
    assert torch.equal(found.decode(), plain)
    per, num_bytes = GROUP_SIZES[type]
    assert found.nbytes == 6 * 512 // per * num_bytes
    for dtype in TOLERANCE:
        assert torch.equal(decoded(found, dtype), plain.to(dtype))
        ids = torch.tensor([5, 0, 5], device=device)
        assert torch.equal(looked_up(found, ids, dtype, 2.0), plain.to(dtype)[ids] * 2.0)


def test_groups_with_equal_scales_are_joined_and_rows_are_padded(device: torch.device) -> None:
    weight = quants("FP8", 4, 256)
    weight.stored.view(4, -1, 36)[:, :, :4] = weight.stored.view(4, -1, 36)[:, :1, :4]
    found = as_groups(weight)
    assert found is not None and found.group_size == 256 and found.nbytes == 4 * 256 + 4 * 4
    longer = found.padded(6).joined([found])
    assert torch.equal(longer.decode(), torch.cat((weight.dequantise(), torch.zeros(2, 256), weight.dequantise())))


def check(way: FewChoice | TileChoice, type: str, n: int, k: int, rows: int, dtype: torch.dtype, extra: bool, device: torch.device) -> None:  # fmt: skip
    weight = make(type, n, k, device)
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]  # rows with gaps between them
    wide = torch.randn(rows, n + 5, device=device).to(dtype)  # out is a part of it
    before, out = wide.clone(), wide[:, 3 : n + 3]
    bias = torch.randn(n, device=device).to(dtype) if extra else None
    y = F.linear(x.float(), weight.decode(), None if bias is None else bias.float())
    if extra:
        y += out.float()
    residual = out if extra else None
    if isinstance(way, FewChoice):
        few_product(x, weight, out, residual, bias, way, device.type == "cuda")
    else:
        tile_product(x, weight, out, residual, bias, way, device.type == "cuda")
    assert distance(out, y) < TOLERANCE[dtype], (way, type, n, k, rows, dtype)
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, n + 3 :], before[:, n + 3 :])


@pytest.mark.parametrize("type", GROUP_SIZES)
def test_few_rows(type: str, device: torch.device) -> None:
    check(FewChoice(4, 1, 2), type, 10, 768, 1, torch.bfloat16, False, device)
    check(FewChoice(2, 2, 1), type, 5, 512, 3, torch.float16, True, device)


@pytest.mark.parametrize("type", GROUP_SIZES)
def test_tiles(type: str, device: torch.device) -> None:
    check(TileChoice(16, 128, 16, 1, 4, 2), type, 40, 768, 5, torch.bfloat16, True, device)
    check(TileChoice(32, 128, 16, 2, 4, 2), type, 40, 768, 17, torch.float16, False, device)


def test_odd_widths(device: torch.device) -> None:
    for k in (32, 96, 1056):
        check(FewChoice(2, 2, 2), "Q4_1", 6, k, 2, torch.float16, True, device)
        check(TileChoice(16, 128, 16, 2 if k > 256 else 1, 4, 2), "Q8_0", 20, k, 3, torch.bfloat16, True, device)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 6, MANY_ROWS + 1])
def test_the_whole_product(rows: int, is_fixed: bool, device: torch.device) -> None:
    weight = make("Q4_K", 24, 256, device)
    x = torch.randn(rows, 256, device=device).bfloat16()
    bias = torch.randn(24, device=device).bfloat16()
    for residual in (False, True):
        out = torch.ones(rows, 24, device=device, dtype=torch.bfloat16)
        y = F.linear(x.float(), weight.decode(), bias.float()) + float(residual)
        group_linear(x, weight, out, bias=bias, residual=out if residual else None, pdl=True, is_fixed=is_fixed)
        assert not rows or distance(out, y) < 1e-2


def test_shares_fit_the_scratch_memory() -> None:
    for n in (64, 1000, 4096, 28672, 151936):
        for k in (32, 96, 576, 4096, 14336):
            for group in (16, 32, 128, k):
                for rows in row_counts(512):
                    choice = choose(rows, n, k, group, 132)
                    if isinstance(choice, TileChoice) and choice.split > 1:
                        tiles = -(-n // choice.block_n) * -(-rows // choice.rows)
                        assert tiles <= MAX_SHARED_TILES
                        assert tiles * choice.split * choice.block_n * choice.rows <= SCRATCH_NUMBERS


# ── the compiler ────────────────────────────────────────────────────────────────────────────────────

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from octavo.kernels.triton.gemm import groups_few, groups_tile

KINDS = {
    "Q4_K": (dict(codes="*u8", scales="*i8", outer="*fp16", minimums="*u8", outer_minimums="*fp16"), 32, 0),
    "Q6_K": (dict(codes="*i8", scales="*i8", outer="*fp16"), 16, 0),
    "FP8": (dict(codes="*fp8e4nv", scales="*fp32"), 128, 0),
}

def compiled(kernel, pointers, numbers, constants, options):
    names = [parameter.name for parameter in kernel.params]
    types = pointers | dict.fromkeys(numbers, "i32")
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in pointers or name == "x_stride"}
    rest = {name: None for name in ("residual", "bias", "outer", "minimums", "outer_minimums", "scratch", "arrivals") if name in names and name not in types}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in names}, constants | rest, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

for kind, (pointers, group, zero) in KINDS.items():
    pointers = pointers | {"x": "*bf16", "out": "*bf16"}
    numbers = ("num_rows", "n", "x_stride", "out_stride")
    constants = dict(K=4096, GROUP=group, ZERO=zero, BLOCK_N=4, LANES=128, AHEAD=1, ROWS=1, PDL=True)
    few = compiled(groups_few._few_product, pointers, numbers, constants, {"num_warps": 4, "launch_pdl": True})
    assert "griddepcontrol.wait" in few.asm["ptx"] and "evict_first.L2::cache_hint.v4.b32" in few.asm["ptx"], kind
    constants = dict(K=4096, GROUP=group, ZERO=zero, BLOCK_N=64, BLOCK_K=128, ROWS=16, SPLIT=1, PDL=True)
    tile = compiled(groups_tile._tile_product, pointers, numbers, constants, {"num_warps": 4, "num_stages": 3, "launch_pdl": True})
    assert "wgmma.mma_async" in tile.asm["ptx"], kind
    assert tile.metadata.shared <= 227 * 1024
"""


def test_compiles_for_the_chip() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
