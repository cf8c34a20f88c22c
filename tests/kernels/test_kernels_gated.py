"""Gated products of the specialised kernel against float32: its source on a model of the chip's barriers, and on the chip;
where it is chosen; and a layer that uses it."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from octavo.kernels.triton.gemm import gated, gated_hopper
from octavo.kernels.triton.gemm.gated import BLOCK_K, TILES, Tile, choose_tile, gated_linear, gated_row_counts, pays
from octavo.layers.mlp import GatedMLP, warm_up_gates
from octavo.layers.norm import RMSNorm
from tests.contexts import context
from tests.kernels import gluon_model
from tests.kernels.gluon_model import Deadlock, Descriptor, Number, Pointer

HELPERS = vars(gated_hopper)
PROCESSORS = 132


def expected(x, weight, name="silu"):
    """The expected result in float32."""
    gate, up = (x.float() @ weight.float().t()).chunk(2, 1)
    return (F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")) * up


def error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def run_model(tile: Tile, rows: int, n: int, k: int, seed: int, name="silu", processors=3, helpers=HELPERS) -> None:
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal(size).astype(np.float16) for size in ((rows, k), (2 * n, k)))
    weight /= 8  # sums of a size at which activation functions differ
    out = np.full((rows, n), np.nan, np.float16)
    tiles = tile.num_tiles(rows, n)
    args = (
        Descriptor(x, (tile.block_m, BLOCK_K)), Descriptor(weight, (tile.piece, BLOCK_K)), Pointer(out.reshape(-1)),
        *map(Number, (rows, n, -(-k // BLOCK_K), tiles)), *tile.widths, tile.sides, name, 3, False, True,
    )  # fmt: skip
    gluon_model.run("_product", helpers, min(tiles, processors), seed, args)
    assert error(torch.from_numpy(out), expected(torch.from_numpy(x), torch.from_numpy(weight), name)) < 2e-3


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_kernel_on_a_model(tile):
    rng = random.Random(str(tile))
    for seed, name in enumerate(("silu", "gelu_tanh", "silu")):
        rows, n, k = rng.randint(1, 300), 8 * rng.randint(1, 40), 8 * rng.randint(17, 60)
        run_model(tile, rows, n, k, seed, name, processors=rng.choice([1, 3, 99]))


FAULTS = {
    "a block is freed while a product may still read it": (
        AssertionError, "_multiply", "warpgroup_mma_wait(PRODUCTS, deps=[acc])", "warpgroup_mma_wait(2, deps=[acc])",
    ),
    "the last block of a tile is never freed": (
        Deadlock, "_multiply", "(number + count - 1) % shape.STAGES), count=1)", "0), count=1, pred=False)",
    ),
    "a block is filled while it is still read": (
        (AssertionError, Deadlock), "_produce", "(number // shape.STAGES & 1) ^ 1)", "number // shape.STAGES & 1)",
    ),
    "a tile begins with the sums of the one before": (AssertionError, "_multiply", "sums = step > 0", "sums = True"),
    "up is taken for the gate": (AssertionError, "_store", "gate, up = ", "up, gate = "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_model_sees_faults(fault):
    wrong, name, old, new = fault
    helpers = HELPERS | {name: gluon_model.changed(HELPERS[name], old, new)}
    if "sums" in old:  # on a chip registers hold the sums: zeros come only with the first product
        helpers["_consume"] = gluon_model.changed(HELPERS["_consume"], "acc = gl.zeros(", "acc = 1.0 + gl.zeros(")
    with pytest.raises(wrong):
        for seed in range(5):
            run_model(Tile(64, 128), 130, 192, 640, seed, helpers=helpers)


def test_every_tile_has_a_place_of_its_own():
    rng = random.Random(0)
    for _ in range(100):
        rows, n, tile = rng.randint(1, 3000), 8 * rng.randint(1, 200), rng.choice(TILES)
        env = gluon_model.environment(HELPERS, 1, 0)
        shape = env["Shape"](tile.block_m, *tile.widths, tile.sides, "silu", 3, False, False)
        count = tile.num_tiles(rows, n)
        work = env["Work"](Number(rows), Number(n), Number(1), Number(count))
        places = {tuple(map(int, env["_place"](work, Number(index), shape))) for index in range(count)}
        corners = {(row, output) for row in range(0, rows, tile.block_m) for output in range(0, n, tile.outputs)}
        assert places == corners and len(places) == count


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_on_a_processor(tile):
    assert sum(tile.widths) * tile.sides == tile.block_n
    assert all(width & (width - 1) == 0 for width in tile.widths)
    assert tile.stages >= 4 and tile.stages * sum(tile) * BLOCK_K * 2 <= 226 * 1024
    assert all(width // 2 % tile.piece == 0 for width in tile.widths)
    assert tile.piece % 8 == 0  # whole swizzle patterns


def test_the_fastest_tiles_measured_are_chosen():
    """As measured on an H200 with 3072 outputs; (128, 64) was the fastest with 128 rows, (64, 128) 3 % slower."""
    fastest = {64: (64, 128), 128: (64, 128), 192: (64, 256), 256: (128, 128), 384: (128, 192), 512: (128, 192)}
    for rows, tile in (fastest | {1024: (128, 192), 8192: (128, 256)}).items():
        assert choose_tile(rows, 3072, PROCESSORS) == tile
    for rows, tile in {64: (64, 128), 128: (128, 256), 256: (128, 256), 1024: (128, 256)}.items():
        assert choose_tile(rows, 14336, PROCESSORS) == tile


def test_it_pays_where_it_was_seen_to():
    """As measured on an H200: see the table in benchmarks/gpu.md."""
    for (n, k), wins, losses in (
        ((3072, 1024), (8, 32, 64, 192, 1024, 8192), (1, 4)),
        ((6144, 2048), (8, 64, 128, 256, 320, 512, 1024, 2048), (4, 192, 384, 8192)),
        ((9728, 2560), (32, 64, 128, 192, 320, 384, 512, 1024, 2048), (256, 8192)),
        ((14336, 4096), (33, 64, 96, 128, 256), (8, 32, 192, 320, 384, 512, 768, 1024, 8192)),
    ):
        assert [rows for rows in wins if not pays(rows, n, k, PROCESSORS)] == []
        assert [rows for rows in losses if pays(rows, n, k, PROCESSORS)] == []


def test_where_there_is_no_kernel(monkeypatch):
    """On a machine without the chip; and with it, for other types, activations and shapes."""
    half = torch.empty(512, 64, dtype=torch.float16)
    assert not gated.gated_pays(64, half, "silu") and gated_row_counts(half, "silu", 8192) == []
    monkeypatch.setattr(gated, "is_hopper", lambda device: True)
    monkeypatch.setattr(gated, "_can_run", gated._can_run.__wrapped__)
    assert gated.gated_pays(64, half, "silu") and gated.gated_pays(64, half, "gelu_tanh")
    for weight, name in (
        (half.float(), "silu"), (half, "gelu"), (half[:, :60].contiguous(), "silu"), (half[:504], "silu"),
    ):  # fmt: skip
        assert not gated.gated_pays(64, weight, name)
    monkeypatch.setattr(gated, "knows_gluon", lambda: False)
    assert not gated.gated_pays(64, half, "silu")


def test_every_kernel_is_met_in_a_rehearsal(monkeypatch):
    monkeypatch.setattr(gated, "_can_run", lambda device, dtype: True)
    monkeypatch.setattr(gated, "num_processors", lambda device: PROCESSORS)
    for n, k, most in ((3072, 1024, 8192), (4864, 896, 2000), (14336, 4096, 8192), (1536, 576, 40), (64, 64, 20)):
        weight = torch.empty(2 * n, k, dtype=torch.float16, device="meta")
        counts = gated_row_counts(weight, "silu", most)
        met = {choose_tile(rows, n, PROCESSORS) for rows in counts}
        assert len(met) == len(counts) and all(rows <= most for rows in counts)
        every = {choose_tile(rows, n, PROCESSORS) for rows in range(1, most + 1) if pays(rows, n, k, PROCESSORS)}
        assert met == every


# ── a layer ─────────────────────────────────────────────────────────────────


class OnModel:
    """Replaces the launcher: runs the kernel's source on numpy arrays."""

    def __init__(self):
        self.num_launches = 0
        self.is_rehearsal = False

    def __call__(self, grid, args, constants, options):
        self.num_launches += 1
        if self.is_rehearsal:
            return
        rows, weights, out, *numbers = args
        args = (
            *(Descriptor(part.base.numpy(), tuple(part.block_shape)) for part in (rows, weights)),
            Pointer(out.numpy().reshape(-1)), *map(Number, numbers), *constants,
        )  # fmt: skip
        gluon_model.run("_product", HELPERS, grid[0], self.num_launches, args)


@pytest.fixture
def launched(device, monkeypatch):
    """Counts launches. Without a chip they run on the model."""
    launcher = gated_hopper._launch_product
    if device.type == "cuda":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("compute capability 9.0 only")
        counted = SimpleNamespace(num_launches=0, is_rehearsal=False)

        def launch(*args):
            counted.num_launches += 1
            launcher(*args)

        monkeypatch.setattr(gated_hopper, "_launch_product", launch)
        return counted
    monkeypatch.setattr(gated, "_can_run", lambda device, dtype: True)
    model = OnModel()
    monkeypatch.setattr(gated_hopper, "_launch_product", model)
    return model


@pytest.mark.parametrize(("act", "bias"), [("silu", False), ("gelu_pytorch_tanh", False), ("silu", True)])
def test_a_layer_takes_it(act, bias, device, launched):
    """Compare with the same layer in torch, in float32; with a bias and for few rows it uses other kernels."""
    hidden, inner = 72, 88
    torch.manual_seed(0)
    tensors = {
        "gate": torch.randn(inner, hidden) / 6, "up": torch.randn(inner, hidden) / 6,
        "down": torch.randn(hidden, inner) / 9, "norm": torch.randn(hidden), "bias": torch.randn(2, inner),
    }  # fmt: skip
    layers = []
    for dtype, kernels in ((torch.float32, ""), (torch.float16, "triton")):
        surroundings = context(dtype=dtype, device=device, kernels=kernels)
        layer = GatedMLP(hidden, inner, act, RMSNorm(hidden, 1e-6, surroundings), surroundings, bias=bias)
        for part, name in enumerate(("gate", "up")):
            layer.gate_up.fill_weight(part, tensors[name].to(device, dtype))
            if bias:
                layer.gate_up.fill_bias(part, tensors["bias"][part].to(device, dtype))
        layer.down.fill_weight(tensors["down"].to(device, dtype))
        if bias:
            layer.down.fill_bias(torch.zeros(hidden, dtype=dtype, device=device))
        for slot in layer.norm.weight_slots("norm").values():
            slot.store(tensors["norm"].to(device, dtype))
        layers.append(layer)
    plain, ours = layers
    for rows, is_taken in ((4, False), (33, True), (150, True)):
        x = torch.randn(rows, hidden).to(device, torch.float16)
        before = launched.num_launches
        assert error(ours(x.clone()), plain(x.float())) < 3e-3
        assert launched.num_launches - before == (is_taken and not bias)
    before, launched.is_rehearsal = launched.num_launches, True
    warm_up_gates(nn.ModuleList([ours, ours]), 200)
    counts = gated_row_counts(ours.gate_up.weight.tensor, "silu", 200)
    assert counts and launched.num_launches - before == (0 if bias else len(counts))


# ── the compiler and the chip ───────────────────────────────────────────────

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.kernels.triton.gemm.gated import Tile
from octavo.kernels.triton.gemm.gated_hopper import MAX_REGISTERS, PANEL_LAYOUT, _product

for tile, activation in ((Tile(128, 256), "silu"), (Tile(128, 192), "gelu_tanh"), (Tile(64, 128), "silu")):
    heights = {"x": tile.block_m, "w": tile.piece}
    values = (*tile.widths, tile.sides, activation, tile.stages, tile.trades, True)
    names = [parameter.name for parameter in _product.params]
    constants = dict(zip(names[-len(values):], values, strict=True))
    types = {name: f"tensordesc<bf16[{height}, 64],{PANEL_LAYOUT!r}>" for name, height in heights.items()}
    types |= {"out": "*bf16"} | dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(_product, {name: types.get(name, "i32") for name in names}, constants)
    options = {"num_warps": 4, "maxnreg": MAX_REGISTERS, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata.shared
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "setmaxnreg", "griddepcontrol.wait"):
        assert word in kernel.asm["ptx"], word
"""


def test_compiles_for_the_chip():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Each case compiles a kernel: outputs that do not divide by 16, the other type and activation appear only once.
CASES = [(torch.bfloat16, tile, "silu", 1008) for tile in TILES]
CASES += [(torch.float16, Tile(128, 192), "gelu_tanh", 1008), (torch.bfloat16, Tile(64, 256), "silu", 1000)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tile", "name", "n"), CASES, ids=str)
def test_the_kernel(dtype, tile, name, n, device, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    monkeypatch.setattr(gated, "choose_tile", lambda *shape: tile)
    torch.manual_seed(0)
    for k in (200, 1024):
        weight = torch.randn(2 * n, k, device=device).to(dtype) / 8
        for rows in (1, 63, 64, 65, 200, 513, 4000):
            x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]  # rows with gaps between them
            found = gated_linear(x, weight, name, pdl=True)
            assert error(found, expected(x, weight, name)) < 5e-3
            assert torch.equal(found, gated_linear(x, weight, name))
