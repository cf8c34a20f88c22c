"""Products of 1 to 8 rows by programs that stay: their tiles, the kernels and their assembly on a model of the chip, and compiled. On a GPU
they run, too."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.gemm import int4
from octavo.kernels.triton.gemm.int4_layout import decode, make_room, store
from octavo.kernels.triton.gemm.stream import (
    FP8_COLUMNS,
    HELD_TILES,
    StreamChoice,
    choose_fp8,
    choose_int4,
)
from octavo.kernels.triton.runtime.launch import knows_gluon

if not knows_gluon():
    pytest.skip("this Triton's Gluon is another", allow_module_level=True)

from octavo.kernels.triton.gemm import fp8_stream, int4_few, int4_stream, stream_parts
from octavo.kernels.triton.gemm.int4_few import FewChoice
from octavo.kernels.triton.gemm.skinny import few_rows_linear, pays_fp8
from tests.kernels import gluon_model
from tests.kernels.gluon_model import BFloat16, Number, Pointer

PARTS = {name: value for name, value in vars(stream_parts).items() if not name.startswith("__")}
INT4_HELPERS, FP8_HELPERS = PARTS | vars(int4_stream), PARTS | vars(fp8_stream)
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 1e-3}  # rounded once
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
INT4 = [StreamChoice(16, 1, 1, 2, 4), StreamChoice(16, 1, 1, 1, 2)]
FP8 = {
    4096: [StreamChoice(16, 1, 1, 2, 8), StreamChoice(16, 1, 1, 1, 4), StreamChoice(8, 1, 2, 1, 6)],
    8704: [StreamChoice(8, 1, 2, 1, 7)],
}


# ── which ───────────────────────────────────────────────────────────────────────────────────────────

ROWS = (1, 2, 3, 4, 5, 8, 9, 16)


def test_the_fastest_measured_is_chosen():
    paired, single, (wide, deep, once), (many,) = *INT4, FP8[4096], FP8[8704]
    shapes = {"gate_up": (28672, 4096), "qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336)}
    found = {name: [choose_int4(rows, *shape, 128, 132) for rows in ROWS] for name, shape in shapes.items()}
    assert found == {
        "gate_up": [paired] * 6 + [None] * 2, "qkv": [single] * 6 + [None] * 2,
        "o": [None, None, paired, paired, None, None, None, None], "down": [None] * 8,
    }  # fmt: skip
    found = {name: [choose_fp8(rows, *shape, 132) for rows in ROWS] for name, shape in shapes.items()}
    assert found == {
        "gate_up": [None] + [wide] * 5 + [None] * 2, "qkv": [None] + [deep] * 5 + [None] * 2,
        "o": [None] + [once] * 5 + [None] * 2, "down": [None] + [many] * 5 + [None] * 2,
    }  # fmt: skip


def test_what_was_not_measured_is_left_to_other_kernels():
    assert choose_int4(4, 28672, 4096, 64, 132) is None and choose_int4(4, 28672, 4096, 32, 132) is None
    assert choose_int4(4, 28672 + 16, 4096, 128, 132) is None and choose_int4(4, 28672, 8192, 128, 132) is None
    assert (
        choose_int4(4, 16 * 2 * 132 + 64, 4096, 128, 132) is None
        and choose_fp8(4, 16 * 2 * 132 + 64, 4096, 132) is None
    )
    assert choose_fp8(4, 28672, 5120, 132) is None and choose_fp8(4, 1024, 4096, 132) is None
    assert choose_fp8(4, 4096, 4096 + 64, 132) is None and choose_fp8(4, 4096, 2048, 132) is None


def test_choices_fit_the_kernels():
    rng = random.Random(1)
    met = set()
    for _ in range(20000):
        n, k = 8 * rng.randint(1, 4000), rng.choice((64 * rng.randint(1, 300), 4096))
        rows, processors = rng.randint(1, 20), rng.choice((78, 114, 132, 144))
        if (choice := choose_int4(rows, n, k, 128, processors)) is not None:
            loop = choice.depth * (k // 128 // choice.num_warps)
            assert rows <= 8 and n % 16 == 0 and k % (128 * choice.num_warps) == 0
            assert k // 128 // choice.num_warps <= HELD_TILES and choice.ahead == loop
        if (eight := choose_fp8(rows, n, k, processors)) is not None:
            tiles = k // FP8_COLUMNS // eight.num_warps
            assert 1 < rows <= 8 and n % 16 == 0 and k % (FP8_COLUMNS * eight.num_warps) == 0
            if tiles <= 2 * HELD_TILES:
                assert eight.ahead == eight.depth * tiles
            else:
                assert eight.ahead <= tiles and n // 16 <= eight.per_processor * processors
        met |= {choice, eight}
    assert met == {None, *INT4, *FP8[4096], *FP8[8704]}


# ── on a model of the chip ──────────────────────────────────────────────────────────────────────────


def int4_weight(n, k, group, dtype, device, is_gated):
    """A weight and its numbers in float32."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 17, (n, k // group), device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5).mul_(0.01).half()
    weight = make_room(n, k, group, dtype, torch.device(device), is_gated)
    store(weight, 0, codes, zeros, scales)
    return weight, decode(weight)


def fp8_weight(n, k, device):
    numbers = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(n, device=device).add_(0.5).mul_(0.02)
    return numbers, scales, numbers.float() * scales[:, None]


def reference(x, exact, bias, residual, gated):
    y = x.double() @ exact.double().t()
    y = y if bias is None else y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = ACTIVATIONS[gated](gate) * up
    return y if residual is None else y + residual.double()


def distance(a, b):
    return float((a.double() - b).norm() / b.norm())


def pointer(tensor):
    """To numbers that the kernel may change. bfloat16 becomes float32 with a name."""
    if tensor is None:
        return None
    made = Pointer(tensor.float().numpy().reshape(-1) if tensor.dtype == torch.bfloat16 else tensor.numpy().reshape(-1))
    if tensor.dtype == torch.bfloat16:
        made.dtype.element_ty = BFloat16
    return made


def words(tensor):
    return Pointer(tensor.view(torch.int32).numpy().reshape(-1))


def in_fragments(x):
    """Columns 64 a + 16 b + 8 c + 2 d + e, as rms_norm() leaves them."""
    return x.view(len(x), -1, 2, 4, 2, 4, 2).permute(0, 1, 5, 3, 4, 2, 6).reshape(x.shape).contiguous()


def run_int4(choice, k, group, dtype, gated, extra, rows, fragments, programs, helpers=INT4_HELPERS):
    torch.manual_seed(rows + group)
    n = 128
    weight, exact = int4_weight(n, k, group, dtype, "cpu", bool(gated))
    x = torch.randn(rows, k).to(dtype)
    width = n // 2 if gated else n
    bias = torch.randn(n).to(dtype) if extra else None
    residual = torch.randn(rows, width).to(dtype) if extra and not gated else None
    wanted = reference(x, exact, bias, residual, gated)
    out = pointer(torch.full((rows, width), float("nan"), dtype=dtype) if residual is None else residual)
    blocks = k // 128
    args = (
        words(in_fragments(x) if fragments else x), words(weight.codes), words(weight.scales), out, out if residual is not None else None,
        pointer(bias), *map(Number, (rows, width, k // 2, n // 16)), blocks, 128 // group, choice.num_warps, choice.pairs, choice.depth,
        choice.ahead, choice.is_early, blocks // choice.num_warps <= HELD_TILES, fragments, weight.is_interleaved, gated, True,
    )  # fmt: skip
    gluon_model.run("_int4_stream", helpers, programs, rows, args)
    return distance(torch.from_numpy(out.numbers.reshape(rows, width).astype(np.float32)), wanted)


@pytest.mark.parametrize("choice", [*INT4, StreamChoice(16, 1, 1, 1, 2, True)], ids=str)
@pytest.mark.parametrize(
    ("group", "dtype", "gated", "extra", "rows", "fragments", "programs"),
    [
        (128, torch.float16, "silu", True, 1, True, 3), (128, torch.bfloat16, "", True, 8, False, 5),
        (64, torch.bfloat16, "gelu_tanh", False, 3, False, 3), (32, torch.float16, "", False, 5, True, 8),
    ],
)  # fmt: skip
def test_4_bits_on_a_model(choice, group, dtype, gated, extra, rows, fragments, programs):
    assert run_int4(choice, 4096, group, dtype, gated, extra, rows, fragments, programs) < TOLERANCE[dtype]


def run_fp8(choice, k, dtype, gated, extra, rows, programs, size=1.0, helpers=FP8_HELPERS):
    torch.manual_seed(rows + k)
    n = 112 if gated else 80
    numbers, scales, exact = fp8_weight(n, k, "cpu")
    x = (torch.randn(rows, k) * size).to(dtype)
    width = n // 2 if gated else n
    bias = torch.randn(n).to(dtype) if extra else None
    residual = torch.randn(rows, width).to(dtype) if extra and not gated else None
    wanted = reference(x, exact, bias, residual, gated)
    out = pointer(torch.full((rows, width), float("nan"), dtype=dtype) if residual is None else residual)
    is_held = k // FP8_COLUMNS // choice.num_warps <= 2 * HELD_TILES
    args = (
        words(x), words(numbers), pointer(scales), out, out if residual is not None else None, pointer(bias),
        *map(Number, (rows, width, k // 2, n // 16)), k, choice.num_warps, choice.pairs, choice.depth, choice.ahead, choice.is_early, is_held, gated, True,
    )  # fmt: skip
    gluon_model.run("_fp8_stream", helpers, programs if is_held else n // 16, rows, args)
    return distance(torch.from_numpy(out.numbers.reshape(rows, width).astype(np.float32)), wanted)


@pytest.mark.parametrize(
    ("k", "choice"),
    [*((k, choice) for k in FP8 for choice in FP8[k]), *((k, FP8[k][-1]._replace(is_early=True)) for k in FP8)],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "gated", "extra", "rows", "programs"),
    [(torch.float16, "silu", True, 2, 3), (torch.bfloat16, "", True, 8, 2), (torch.bfloat16, "gelu_tanh", False, 5, 4)],
)
def test_8_bits_on_a_model(k, choice, dtype, gated, extra, rows, programs):
    assert run_fp8(choice, k, dtype, gated, extra, rows, programs) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [1e-3, 1e5])
def test_8_bits_with_small_and_large_inputs(size):
    assert run_fp8(FP8[4096][1], 4096, torch.bfloat16, "", False, 3, 3, size) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "choice",
    [FewChoice(1, 4, 8), FewChoice(1, 4, 7, 3, 2), FewChoice(2, 4, 2, 2, 2), FewChoice(1, 8, 3, 2, 1)],
    ids=str,
)
@pytest.mark.parametrize(
    ("k", "group", "dtype", "gated", "rows"),
    [(1280, 128, torch.float16, "", 1), (1056, 32, torch.bfloat16, "silu", 3), (2048, 64, torch.float16, "", 8)],
)
def test_4_bits_without_staying_on_a_model(choice, k, group, dtype, gated, rows):
    """`int4_few`: what takes 1 to 4 rows elsewhere."""
    torch.manual_seed(rows)
    n = 128
    weight, exact = int4_weight(n, k, group, dtype, "cpu", bool(gated))
    x, width = torch.randn(rows, k).to(dtype), n // 2 if gated else n
    residual = None if gated else torch.randn(rows, width).to(dtype)
    wanted = reference(x, exact, None, residual, gated)
    out = pointer(torch.empty(rows, width, dtype=dtype) if residual is None else residual)
    blocks = -(-k // 128)
    tiles = -(-blocks // choice.num_warps)
    args = (
        words(x), words(weight.codes), words(weight.scales), out, out if residual is not None else None, None,
        *map(Number, (rows, width, k // 2)), k, blocks, 128 // group, choice.pairs, choice.num_warps, min(choice.ahead, tiles),
        min(choice.x_ahead, tiles), choice.chains, False, weight.is_interleaved, gated, True,
    )  # fmt: skip
    gluon_model.run("_few_product", vars(int4_few), n // 16 // choice.pairs, rows, args)
    found = torch.from_numpy(out.numbers.reshape(rows, width).astype(np.float32))
    assert distance(found, wanted) < TOLERANCE[dtype]


FAULTS = {
    "a tile is used twice": ("_int4_stream", "queue = queue[PAIRS * W :] + fresh", "queue = queue + fresh"),
    "the next outputs' tiles are those of the next block": ("_int4_stream", "(t + AHEAD) % TILES,", "(t + 1 + AHEAD) % TILES,"),
    "products begin with a wrong number": ("_int4_x", "gl.full([index.shape[0]], 0.0", "gl.full([index.shape[0]], 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_model_sees_faults(fault):
    name, old, new = fault
    helpers = INT4_HELPERS | {name: gluon_model.changed(INT4_HELPERS[name], old, new)}
    error = run_int4(INT4[0], 4096, 128, torch.bfloat16, "", False, 2, False, 3, helpers=helpers)
    assert not error < TOLERANCE[torch.bfloat16]


# ── the compiler and the chip ───────────────────────────────────────────────────────────────────────

COMPILE = """
import subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.kernels.triton.gemm.fp8_stream import _fp8_stream
from octavo.kernels.triton.gemm.int4_stream import _int4_stream
from octavo.kernels.triton.gemm.stream import StreamChoice, options

def check(kernel, half, choice, others, **constants):
    names = [parameter.name for parameter in kernel.params]
    types = dict.fromkeys(("num_rows", "n", "x_stride", "units"), "i32") | dict.fromkeys(("x", "codes", "weight"), "*i32")
    types |= {"out": "*" + half, "residual": "*" + half} | others
    types = {name: kind for name, kind in types.items() if name not in constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    whole = [index for index, name in enumerate(names) if "*" in signature[name] or name in ("n", "x_stride")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in whole}
    constants |= dict(bias=None, KB=choice.num_warps, PAIRS=choice.pairs, DEPTH=choice.depth, AHEAD=choice.ahead, EARLY=choice.is_early, PDL=True)
    source = GluonASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options(choice, True))
    for word in ("mma.sync.aligned.m16n8k16", "griddepcontrol.wait", "ld.global.v4"):
        assert word in made.asm["ptx"], word
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said, (choice, said)

for half, choice, gated in (("fp16", StreamChoice(16, 1, 1, 2, 4), "silu"), ("bf16", StreamChoice(16, 1, 1, 1, 2), "")):
    constants = dict(BLOCKS=32, SUB=1, HELD=True, FRAGMENTS=True, INTERLEAVED=bool(gated), GATED=gated, residual=None)
    check(_int4_stream, half, choice, {"scales": "*i32"}, **constants)
for choice, k in ((StreamChoice(16, 1, 1, 2, 8), 4096), (StreamChoice(8, 1, 2, 1, 7), 14336)):
    gate = {"GATED": "silu", "residual": None} if choice.depth > 1 else {"GATED": ""}
    check(_fp8_stream, "bf16", choice, {"scales": "*fp32"}, K=k, HELD=choice.num_warps == 16, **gate)
"""


def test_compiles_for_the_chip_without_spilling():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_4_bits(dtype, group, device):
    on_hopper()
    rng = random.Random(group)
    for rows in range(1, 9):
        n, gated = 64 * rng.randint(1, 120), rng.choice(("", "silu", "gelu_tanh"))
        weight, exact = int4_weight(n, 4096, group, dtype, device, bool(gated))
        width = n // 2 if gated else n
        x = torch.randn(rows, 4096 + 8, device=device).to(dtype)[:, :4096]
        bias = rng.choice((None, torch.randn(n, device=device).to(dtype)))
        residual = None if gated else rng.choice((None, torch.randn(rows, width, device=device).to(dtype)))
        wanted = reference(x, exact, bias, residual, gated)
        for choice in INT4:
            out = torch.full_like(wanted, float("nan"), dtype=dtype) if residual is None else residual.clone()
            added = None if residual is None else out
            int4_stream.int4_stream(x, weight, out, added, bias, gated, choice, rng.choice((3, 132)), True)
            assert distance(out, wanted) < TOLERANCE[dtype], (rows, n, gated, choice)


@pytest.mark.gpu
@pytest.mark.parametrize("k", FP8)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_8_bits(dtype, k, device):
    on_hopper()
    rng = random.Random(k)
    for rows in range(1, 9):
        n, gated = 32 * rng.randint(1, 240), rng.choice(("", "silu", "gelu_tanh"))
        numbers, scales, exact = fp8_weight(n, k, device)
        width = n // 2 if gated else n
        x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k] / 16
        bias = rng.choice((None, torch.randn(n, device=device).to(dtype)))
        residual = None if gated else rng.choice((None, torch.randn(rows, width, device=device).to(dtype)))
        wanted = reference(x, exact, bias, residual, gated)
        for choice in FP8[k]:
            out = torch.full_like(wanted, float("nan"), dtype=dtype) if residual is None else residual.clone()
            added = None if residual is None else out
            fp8_stream.fp8_stream(x, numbers, scales, out, added, bias, gated, choice, rng.choice((3, 132)), True)
            assert distance(out, wanted) < TOLERANCE[dtype], (rows, n, gated, choice)


@pytest.mark.gpu
def test_they_are_chosen_and_run_in_graphs(device, monkeypatch):
    on_hopper()
    called = []
    for module, name in ((int4_stream, "int4_stream"), (fp8_stream, "fp8_stream")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, plain=plain: (called.append(1), plain(*args)))
    n, k, dtype = 12288, 4096, torch.bfloat16
    weight, four = int4_weight(n, k, 128, dtype, device, True)
    numbers, scales, eight = fp8_weight(n, k, device)
    norm = (torch.rand(k, device=device).add_(0.5).to(dtype), 1e-5)
    for rows in (2, 3, 8):
        x = torch.randn(rows, k, device=device).to(dtype)
        assert pays_fp8(rows, n, k, x.device)

        def both(x=x):
            return (
                int4.int4_linear(x, weight, norm=norm, gated="silu", pdl=True),
                few_rows_linear(x, numbers, norm=norm, gated="silu", pdl=True, scales=scales),
            )

        eager = both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        graph.replay()
        normed = F.rms_norm(x.float(), (k,), norm[0].float(), norm[1]).to(dtype)
        for found, again, exact in zip(eager, captured, (four, eight), strict=True):
            assert torch.equal(found, again)
            assert distance(found, reference(normed, exact, None, None, "silu")) < 2 * TOLERANCE[dtype]
        assert len(called) == 4
        called.clear()
