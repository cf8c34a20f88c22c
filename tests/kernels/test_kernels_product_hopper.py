"""The specialised matrix product against float32: its own source on a model of the chip's barriers, and on the chip."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from benchmarks.kernels.candidates import product_hopper, product_hopper_plan, product_hopper_work
from benchmarks.kernels.candidates.product_hopper import product
from benchmarks.kernels.candidates.product_hopper_plan import BLOCK_K, Choice, Plan, choose, num_tiles, plan
from tests.kernels import gluon_model
from tests.kernels.gluon_model import Deadlock, Descriptor, Pointer

HELPERS = vars(product_hopper) | vars(product_hopper_work)
TILES = [
    (64, 64),
    (64, 128),
    (64, 192),
    (64, 256),
    (128, 64),
    (128, 128),
    (128, 192),
    (128, 256),
    (256, 128),
    (256, 192),
]


def expected(x, weight, kind, residual):
    y = x @ weight.T
    if kind == "gated":
        gate, up = np.split(y, 2, 1)
        return gate / (1 + np.exp(-gate)) * up
    return y + residual if kind == "residual" else y


def run_model(choice: Choice, work: Plan, rows: int, n: int, k: int, kind: str, seed: int, helpers=HELPERS) -> None:
    rng = np.random.default_rng(seed)
    width = 2 * n if kind == "gated" else n
    x, weight = (rng.standard_normal(size).astype(np.float16) for size in ((rows, k), (width, k)))
    residual = rng.standard_normal((rows, n)).astype(np.float16)
    out = residual.copy() if kind == "residual" else np.full((rows, n), np.nan, np.float16)
    scratch = np.full(max(1, work.scratch_numbers(choice)), np.nan, np.float32)
    arrivals = np.zeros(2 * max(1, work.shared), np.int32)
    is_gated = kind == "gated"
    args = (
        Descriptor(x, (choice.block_m, BLOCK_K)), Descriptor(weight, (choice.piece(is_gated), BLOCK_K)),
        Pointer(out.reshape(-1)), Pointer(scratch), Pointer(arrivals),
        *(gluon_model.Number(value) for value in (rows, n, work.depth, work.whole, work.shared, choice.group)),
        *choice.widths, choice.sides, is_gated, kind == "residual", 3, False, True,
    )  # fmt: skip
    gluon_model.run("_product", helpers, work.num_programs, seed, args)
    want = expected(x.astype(np.float32), weight.astype(np.float32), kind, residual)
    assert np.linalg.norm(out - want) / np.linalg.norm(want) < 2e-3
    assert not arrivals.any()


@pytest.mark.parametrize("kind", ["plain", "residual", "gated"])
@pytest.mark.parametrize("tile", [(64, 64), (64, 192), (128, 64), (128, 192), (256, 128)])
def test_the_kernel_on_a_model(tile, kind):
    rng = random.Random(f"{tile} {kind}")
    for seed, (split, processors) in enumerate([(1, 3), (2, 99), (0, 5)]):
        rows, n, k = rng.randint(1, 300), 8 * rng.randint(1, 40), 8 * rng.randint(17, 60)
        choice = Choice(*tile, split, group=rng.choice([1, 2, 8]))
        work = plan(rows, n, k, choice, kind == "gated", processors)
        run_model(choice, work, rows, n, k, kind, seed)


FAULTS = {
    "a block is freed while a product may still read it": (
        AssertionError, "_multiply", "warpgroup_mma_wait(PRODUCTS, deps=[acc])", "warpgroup_mma_wait(2, deps=[acc])",
    ),
    "the last block of a piece is never freed": (
        Deadlock, "_multiply", "(number + count - 1) % shape.STAGES), count=1)", "0), count=1, pred=False)",
    ),
    "a block is filled while it is still read": (
        (AssertionError, Deadlock), "_produce", "(number // shape.STAGES & 1) ^ 1)", "number // shape.STAGES & 1)",
    ),
    "sums are added up before all of them are there": (
        AssertionError, "_gather", "arrived == highest - lowest", "arrived == highest - lowest - 1",
    ),
    "the residual counts twice where a tile is shared": (
        AssertionError, "_consume", "first == 0, shape.WIDE", "True, shape.WIDE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_model_sees_faults(fault):
    error, name, old, new = fault
    choice = Choice(64, 64, 0)
    work = plan(130, 192, 640, choice, False, 4)
    helpers = HELPERS | {name: gluon_model.changed(HELPERS[name], old, new)}
    with pytest.raises(error):
        for seed in range(5):
            run_model(choice, work, 130, 192, 640, "residual", seed, helpers)


def pieces_of(work: Plan, choice: Choice, rows: int, n: int, program: int):
    """What the kernel's own functions say."""
    env = gluon_model.environment(HELPERS, work.num_programs, program)
    numbers = env["Work"](
        *(gluon_model.Number(v) for v in (rows, n, work.depth, work.whole, work.shared, choice.group))
    )
    count, parts = env["count_pieces"](numbers)
    shape = env["Shape"](choice.block_m, *choice.widths, choice.sides, False, False, 3, False, False)
    for step in range(count):
        tile, first, panels = env["find_piece"](numbers, step, parts)
        yield tile, first, panels, env["place_tile"](numbers, tile, shape)
        if panels < work.depth:
            assert env["owner"](numbers, (tile - work.whole) * work.depth + first) == program


def test_every_panel_of_every_tile_is_somebodys_once():
    rng = random.Random(0)
    for _ in range(150):
        rows, n, k = rng.randint(1, 1500), 8 * rng.randint(1, 200), 8 * rng.randint(1, 200)
        choice = Choice(*rng.choice(TILES), rng.choice([0, 0, 1, 2, 3, 8]), rng.choice([1, 3, 8]))
        work = plan(rows, n, k, choice, False, rng.choice([1, 7, 20, 132]))
        seen: dict[tuple[int, int], int] = {}
        places = {}
        for program in range(work.num_programs):
            panels_here = 0
            for tile, first, panels, place in pieces_of(work, choice, rows, n, program):
                assert panels > 0
                panels_here += int(panels)
                places[int(tile)] = tuple(int(at) for at in place)
                for panel in range(first, first + panels):
                    assert seen.setdefault((tile, panel), program) == program
            if choice.split == 0 and work.shared:  # all have the same, to within one panel of those shared
                fair = work.whole // work.num_programs * work.depth + work.shared * work.depth / work.num_programs
                assert abs(panels_here - fair) < 1
        tiles = num_tiles(rows, n, choice, False)
        assert len(seen) == tiles * work.depth
        corners = {(row, output) for row in range(0, rows, choice.block_m) for output in range(0, n, choice.block_n)}
        assert set(places.values()) == corners and len(places) == tiles


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_on_a_processor(tile):
    choice = Choice(*tile)
    assert sum(choice.widths) * choice.sides == choice.block_n
    assert all(width & (width - 1) == 0 for width in choice.widths)
    assert choice.stages >= 4 and choice.stages * sum(tile) * BLOCK_K * 2 <= 226 * 1024
    assert choice.block_m * choice.block_n <= product_hopper_plan.MAX_TILE
    for is_gated in (False, True):
        assert all(width // (2 if is_gated else 1) % choice.piece(is_gated) == 0 for width in choice.widths)
        assert choice.piece(is_gated) % 8 == 0  # whole swizzle patterns


def test_only_what_was_measured_is_chosen():
    assert choose(64, 12345, 4096, False) is None
    for (n, k, is_gated), entries in product_hopper_plan.MEASURED.items():
        bounds = [bound for bound, _ in entries]
        assert bounds == sorted(set(bounds)) and choose(bounds[-1] + 1, n, k, is_gated) is None
        assert choose(product_hopper_plan.FEW_ROWS, n, k, is_gated) is None
        for bound, choice in entries:
            assert choose(bound, n, k, is_gated) == choice
            if choice is not None:
                work = plan(bound, n, k, choice, is_gated, 132)
                assert work.shared <= product_hopper_plan.SHARED_TILES
                assert work.scratch_numbers(choice) <= 2 * 132 * product_hopper_plan.MAX_TILE


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from benchmarks.kernels.candidates.product_hopper import MAX_REGISTERS, PANEL_LAYOUT, _product
from benchmarks.kernels.candidates.product_hopper_plan import Choice

for tile, is_gated in (((128, 256), True), ((256, 192), False), ((64, 128), False)):
    choice = Choice(*tile)
    heights = {"x": choice.block_m, "w": choice.piece(is_gated)}
    values = (*choice.widths, choice.sides, is_gated, not is_gated, choice.stages, choice.trades(is_gated), True)
    names = [parameter.name for parameter in _product.params]
    constants = dict(zip(names[-len(values):], values, strict=True))
    types = {name: f"tensordesc<bf16[{height}, 64],{PANEL_LAYOUT!r}>" for name, height in heights.items()}
    types |= {"out": "*bf16", "scratch": "*fp32", "arrivals": "*i32"} | dict.fromkeys(constants, "constexpr")
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


# Each is a kernel of its own to compile: outputs that do not divide by 16 and the other type only once.
ON_CHIP = [(64, 64), (64, 256), (128, 128), (128, 192), (256, 128), (256, 192)]
CASES = [(torch.bfloat16, tile, kind, 1008) for tile in ON_CHIP for kind in ("plain", "residual", "gated")]
CASES += [(torch.float16, (128, 192), "gated", 1008), (torch.bfloat16, (128, 192), "residual", 1000)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tile", "kind", "n"), CASES, ids=str)
def test_the_kernel(dtype, tile, kind, n, device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    torch.manual_seed(0)
    for k in (200, 1024):
        weight = torch.randn(2 * n if kind == "gated" else n, k, device=device).to(dtype) / 8
        for rows in (1, 63, 64, 65, 200, 513):
            x = torch.randn(rows, k + 8, device=device).to(dtype)[:, :k]  # rows may lie apart
            residual = torch.randn(rows, n, device=device).to(dtype) if kind == "residual" else None
            want = x.float() @ weight.float().t()
            if kind == "gated":
                want = F.silu(want[:, :n]) * want[:, n:]
            elif residual is not None:
                want += residual.float()
            for split in (1, 2, 3, 0):
                choice = Choice(*tile, split, group=2)
                if plan(rows, n, k, choice, kind == "gated", 132).num_programs > 132:
                    continue
                start = None if residual is None else residual.clone()
                got = product(x, weight, choice, residual=start, is_gated=kind == "gated", pdl=True)
                assert start is None or got is start
                assert ((got.float() - want).norm() / want.norm()).item() < 5e-3
