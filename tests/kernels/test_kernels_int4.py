"""Products with 4-bit weights: how they lie in memory, every kernel against float32, and which is chosen. The kernels in Gluon
run only on a GPU; elsewhere they are compiled."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.errors import ConfigError
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm import int4
from octavo.kernels.triton.gemm.int4 import MANY_ROWS, choose, int4_linear, row_counts
from octavo.kernels.triton.gemm.int4_decode import decoded
from octavo.kernels.triton.gemm.int4_layout import decode, make_room, store
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def make(n, k, group, dtype, device, is_gated=False):
    """A weight, filled in two parts, and its numbers in float32."""
    torch.manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 17, (n, k // group), device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5).mul_(0.01).half()
    weight = make_room(n, k, group, dtype, torch.device(device), is_gated)
    for part in (slice(0, n // 2), slice(n // 2, n)):
        store(weight, part.start, codes[part], zeros[part], scales[part])
    spread = [numbers.float().repeat_interleave(group, dim=1) for numbers in (zeros, scales)]
    return weight, (codes.float() - spread[0]) * spread[1]


def distance(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize(
    ("n", "k", "group", "is_gated"),
    [(64, 128, 128, False), (72, 256, 64, False), (128, 160, 32, True), (192, 384, 128, True)],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_is_stored_is_decoded_exactly(n, k, group, is_gated, dtype, device):
    weight, plain = make(n, k, group, dtype, device, is_gated)
    assert torch.equal(decode(weight), plain)
    assert torch.equal(decoded(weight), plain.to(dtype))
    if n % 64 == 0 and k % 128 == 0:
        assert weight.nbytes == n * k // 2 + n * k // group * 4


def test_outputs_that_are_not_filled_are_zeros(device):
    weight = make_room(96, 192, 64, torch.bfloat16, torch.device(device))
    assert not decode(weight).any() and not decoded(weight).any()


def check(rows, n, k, group, dtype, gated, options, device, is_fixed=False):
    weight, plain = make(n, k, group, dtype, device, bool(gated))
    x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]  # rows with gaps between them
    width = n // 2 if gated else n
    bias = torch.randn(n, device=device).to(dtype) if "bias" in options else None
    norm = (torch.randn(k, device=device).to(dtype), 1e-3) if "norm" in options else None
    residual = torch.randn(rows, width, device=device).to(dtype) if "residual" in options else None
    y = x.float()
    if norm is not None:
        y = F.rms_norm(y, (k,), norm[0].float(), norm[1]).to(dtype).float()
    y = F.linear(y, plain.to(dtype).float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = ACTIVATIONS[gated](gate) * up
    y = y if residual is None else y + residual.float()
    out = int4_linear(x, weight, bias=bias, norm=norm, residual=residual, gated=gated, pdl=True, is_fixed=is_fixed)
    assert out.dtype == dtype and (residual is None or out is residual)
    assert distance(out, y) < TOLERANCE[dtype], (rows, n, k, group, dtype, gated, options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "gated", "options"),
    [
        (1, 64, 128, 128, None, ""), (3, 72, 160, 32, None, "bias norm residual"), (2, 128, 256, 64, "silu", "bias"),
        (5, 64, 128, 32, "gelu_tanh", "norm"), (0, 64, 128, 128, None, "residual"),
    ],
)  # fmt: skip
def test_the_product_and_what_comes_with_it(rows, n, k, group, gated, options, dtype, device):
    if rows:
        check(rows, n, k, group, dtype, gated, options, device)
    else:
        weight, _ = make(n, k, group, dtype, device)
        assert int4_linear(torch.empty(0, k, dtype=dtype, device=device), weight).shape == (0, n)


def test_an_activation_without_a_kernel_is_refused(device):
    weight, _ = make(64, 128, 128, torch.float16, device, is_gated=True)
    with pytest.raises(ConfigError, match="relu"):
        int4_linear(torch.zeros(1, 128, dtype=torch.float16, device=device), weight, gated="relu")


def test_a_norm_leaves_fragments_of_pairs(device):
    torch.manual_seed(1)
    x, weight = (torch.randn(*shape, device=device).bfloat16() for shape in ((2, 256), (256,)))
    plain, found = (rms_norm(x, weight, 1e-5, in_fragments=is_so) for is_so in (False, True))
    # 64 a + 16 b + 8 c + 2 d + e
    wanted = plain.view(2, 2, 2, 4, 2, 4, 2).permute(0, 1, 5, 3, 4, 2, 6)
    assert torch.equal(found, wanted.reshape(2, 256))


# ── which kernel ────────────────────────────────────────────────────────────────────────────────────

SHAPES = {"qkv": (96, 32, False), "o": (64, 32, False), "gate_up": (448, 32, True), "down": (64, 112, False)}


def test_the_fastest_measured_is_chosen():
    picked = {
        name: [choose(rows, *shape, 132, False) for rows in (1, 16, 64, 128, 160, 192, 512)]
        for name, shape in SHAPES.items()
    }
    assert picked == {
        "qkv": [("few", 1, 4, 8), ("tile", 16, 1, 2, 8, 3), ("tile", 64, 1, 2, 5, 2), ("tile", 128, 1, 1, 5, 1), ("tile", 128, 2, 1, 5, 1), ("tile", 128, 2, 1, 5, 1), ("tile", 128, 1, 1, 5, 1)],
        "o": [("few", 1, 4, 8), ("tile", 16, 1, 4, 8, 3), ("tile", 64, 1, 4, 5, 2), ("tile", 64, 1, 2, 5, 2), ("tile", 64, 1, 1, 5, 2), ("tile", 64, 1, 1, 5, 2), ("tile", 128, 2, 1, 5, 1)],
        "gate_up": [("few", 1, 4, 8), ("tile", 16, 1, 1, 8, 2), ("tile", 64, 1, 1, 5, 2), ("tile", 128, 2, 1, 5, 1), ("tile", 256, 2, 1, 3, 1), ("tile", 256, 2, 1, 3, 1), ("tile", 128, 2, 1, 5, 1)],
        "down": [("few", 1, 4, 14), ("tile", 16, 1, 4, 8, 3), ("tile", 64, 1, 4, 5, 2), ("tile", 128, 1, 2, 5, 1), ("tile", 128, 2, 2, 5, 1), ("tile", 128, 2, 2, 5, 1), ("tile", 128, 2, 1, 5, 1)],
    }  # fmt: skip


def test_shares_fit_the_scratch_memory():
    for across in (1, 3, 45, 64, 96, 448, 2000):
        for depth in (1, 5, 23, 32, 112):
            for rows in (1, 3, 8, 16, 20, 33, 64, 100, 256, 500, MANY_ROWS):
                choice = choose(rows, across, depth, False, 132, False)
                assert choice is not None
                if choice[0] == "tile":
                    height, sides, split, stages, _ = choice[1:]
                    tiles = across // sides * -(-rows // height)
                    assert across % sides == 0 and split <= max(1, depth // 2)
                    assert split == 1 or (
                        tiles * split * 64 * sides * height <= SCRATCH_NUMBERS and tiles <= MAX_SHARED_TILES
                    )
                    assert stages * (height * 256 + sides * (4096 + 4 * 256)) < 227 * 1024


def test_the_fixed_choice_never_divides_k():
    for across, depth, is_gated in SHAPES.values():
        for rows in (1, 2, 7, 16, 64, 200, 512, 8192):
            choice = choose(rows, across, depth, is_gated, 132, True)
            assert choice is not None and choice[0] == "tile" and choice[3] == 1


def test_a_rehearsal_meets_every_choice():
    for across, depth, is_gated in SHAPES.values():
        met = {choose(rows, across, depth, is_gated, 132, False) for rows in row_counts(8192)}
        # Shares of K and programs per processor are no kernels of their own beyond these.
        for rows in (1, 2, 4, 8, 16, 32, 64, 96, 160, 256, 300, 512, 700, 1024, 2000, 4096, 8192):
            assert choose(rows, across, depth, is_gated, 132, False) in met


# ── the compiler and the chip ───────────────────────────────────────────────────────────────────────

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.kernels.triton.gemm import int4_few, int4_hopper

def compiled(kernel, types, constants, options):
    names = [parameter.name for parameter in kernel.params]
    source = GluonASTSource(kernel, {name: types.get(name, "constexpr") for name in names}, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

for kind, sub, gated, chains in (("fp16", 1, "", 2), ("bf16", 4, "silu", 1)):
    types = dict.fromkeys(("num_rows", "n", "x_stride"), "i32") | {"out": "*" + kind}
    types |= dict.fromkeys(("x", "codes", "scales"), "*i32")
    constants = dict(residual=None, bias=None, K=512, BLOCKS=4, SUB=sub, PAIRS=1, KB=4, AHEAD=1, X_AHEAD=1, CHAINS=chains, FRAGMENTS=True)
    constants |= dict(INTERLEAVED=bool(gated), GATED=gated, PDL=True)
    kernel = compiled(int4_few._few_product, types, constants, {"num_warps": 4, "launch_pdl": True})
    assert "mma.sync.aligned.m16n8k16" in kernel.asm["ptx"]

for kind, rows, sides, sub, split, stages, gated in (("fp16", 256, 2, 1, 1, 3, ""), ("bf16", 16, 1, 4, 2, 8, "silu")):
    types = dict.fromkeys(("num_rows", "n", "across", "depth", "units"), "i32") | {"out": "*" + kind}
    types["x"] = f"tensordesc<{kind}[{rows}, 64],{int4_hopper.X_LAYOUT!r}>"
    types["codes"] = f"tensordesc<i32[32, 32],{int4_hopper.CODES_LAYOUT!r}>"
    types["scales"] = f"tensordesc<i32[16, 4],{int4_hopper.SCALES_LAYOUT!r}>"
    constants = dict(residual=None, bias=None, SIDES=sides, SUB=sub, SPLIT=split, STAGES=stages)
    constants |= dict(INTERLEAVED=bool(gated), GATED=gated, PDL=True)
    if split == 1:
        constants |= dict(scratch=None, arrivals=None)
    else:
        types |= {"scratch": "*fp32", "arrivals": "*i32"}
    options = {"num_warps": 4 * sides, "maxnreg": 168 if sides == 2 else 128, "launch_pdl": True}
    kernel = compiled(int4_hopper._product, types, constants, options)
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata.shared
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "setmaxnreg", "griddepcontrol.wait", "lop3.b32"):
        assert word in kernel.asm["ptx"], word
"""


def test_compiles_for_the_chip():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("n", "gated", "options"), [(320, None, "bias norm residual"), (512, "silu", "norm"), (384, None, "")]
)
def test_the_kernels(dtype, group, n, gated, options, device):
    on_hopper()
    for k in (960, 1024):
        for rows in (1, 2, 3, 4, 5, 16, 17, 40, 64, 65, 200, 513, 2100):
            check(rows, n, k - k % group, group, dtype, gated, options, device, is_fixed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_fixed_kernels_give_a_row_the_same_bits_in_every_batch(dtype, device):
    on_hopper()
    weight, _ = make(512, 1024, 128, dtype, device, is_gated=True)
    x = torch.randn(600, 1024, device=device).to(dtype)
    everything = int4_linear(x, weight, gated="silu", is_fixed=True)
    for rows in (1, 2, 8, 16, 33, 64, 100, 256, 300):
        assert torch.equal(int4_linear(x[:rows], weight, gated="silu", is_fixed=True), everything[:rows])
    check(33, 512, 1024, 128, dtype, "silu", "norm", device, is_fixed=True)


def test_where_there_is_no_kernel(monkeypatch, device):
    monkeypatch.setattr(int4, "can_run", lambda device: False)
    check(3, 64, 128, 128, torch.float16, None, "bias residual", device)
