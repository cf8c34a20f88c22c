"""Experts on the tensor cores of compute capability 9: how MXFP4 weights lie in memory, which tiles are chosen, and results against
float32. The products run only on such a GPU; elsewhere they are compiled."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS
from octavo.kernels.triton.moe import grouped, mxfp4_layout
from octavo.kernels.triton.moe.expert_plan import Tiles, plan_blocks
from octavo.kernels.triton.moe.gather import gather
from octavo.kernels.triton.moe.grouped import (
    MixedChoice,
    PackedChoice,
    PlainChoice,
    Routing,
    choose_packed,
    choose_plain,
    mixed_experts,
    packed_experts,
    plain_experts,
    row_counts,
)
from octavo.quants import Quants
from octavo.weights.methods.base import ExpertsRequest, Gate, Settings
from octavo.weights.methods.torch_experts import choose
from octavo.weights.methods.triton_mxfp4 import HopperMxfp4Experts
from tests.contexts import context

GATE = (1.702, 7.0, 1.0)


def quants(num_rows, width, seed):
    """Random MXFP4, with a scale from the end of the range."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (num_rows, width // 32, 17), dtype=torch.uint8, generator=generator)
    rows[:, :, 0] = torch.randint(119, 123, rows.shape[:2], dtype=torch.uint8, generator=generator)
    rows[0, 0, 0] = 0
    return Quants("MXFP4", rows.flatten(1))


def pack(weights, width, is_interleaved, device):
    """Weights of experts as the kernels take them, and their numbers [E, N, K] in float32."""
    num_rows = weights[0].shape[0]
    packed = mxfp4_layout.make_room(len(weights), num_rows, width, device, is_interleaved)
    for expert, weight in enumerate(weights):
        rows = weight.rows.view(num_rows, -1, 17).to(device)
        for part in (slice(0, num_rows // 2), slice(num_rows // 2, num_rows)):
            mxfp4_layout.store(packed, expert, part.start, rows[part, :, 1:].flatten(1), rows[part, :, 0])
    return packed, torch.stack([weight.dequantise() for weight in weights]).to(device)


@pytest.mark.parametrize(
    ("num_rows", "width", "is_interleaved"), [(64, 128, False), (72, 96, False), (64, 128, True), (192, 160, True)]
)
def test_what_is_stored_is_decoded_exactly(num_rows, width, is_interleaved, device):
    packed, plain = pack([quants(num_rows, width, seed) for seed in range(2)], width, is_interleaved, device)
    for expert in range(2):
        assert torch.equal(mxfp4_layout.decode(packed, expert), plain[expert])
    if num_rows % 64 == 0 and width % 128 == 0:
        assert packed.nbytes == 2 * num_rows * width * 17 // 32


def test_what_is_not_filled_is_zeros(device):
    packed = mxfp4_layout.make_room(1, 96, 64, device, is_interleaved=False)
    assert not mxfp4_layout.decode(packed, 0).any()


def test_a_layer_holds_the_numbers_it_is_given(device):
    """A rank's last share may have fewer rows: the rest are zeros."""
    hidden, inner = 96, 64
    surroundings = context(dtype=torch.bfloat16, device=device)
    settings = surroundings.methods.settings
    assert isinstance(settings, Settings)
    held = HopperMxfp4Experts(ExpertsRequest(2, hidden, inner, Gate(*GATE)), settings)
    gate, up, down = quants(inner, hidden, 1), quants(inner - 8, hidden, 2), quants(hidden, inner, 3)
    held.fill_gate_up(1, 0, gate)
    held.fill_gate_up(1, 1, up)
    held.fill_down(1, down)
    expected = torch.cat((gate.dequantise(), F.pad(up.dequantise(), (0, 0, 0, 8)))).to(device)
    assert torch.equal(mxfp4_layout.decode(held.gate_up, 1), expected)
    assert torch.equal(mxfp4_layout.decode(held.down, 1), down.dequantise().to(device))
    assert not mxfp4_layout.decode(held.gate_up, 0).any()


@pytest.mark.parametrize(("num_tokens", "depth"), [(1, 40), (23, 1100)])
def test_rows_are_gathered_by_place(num_tokens, depth, device):
    torch.manual_seed(depth)
    x = torch.randn(num_tokens, depth + 8, device=device)[:, :depth]  # rows with gaps between them
    plan = plan_blocks(torch.randn(num_tokens, 6, device=device), 3, True, 16)
    assert torch.equal(gather(x, plan.places, 3, pdl=False), x[plan.order.long() // 3])


# ── which tiles ─────────────────────────────────────────────────────────────────────────────────────


def test_the_fastest_measured_are_chosen():
    """`benchmarks/kernels/experts.py` on an H200: gpt-oss-20b has 32 experts of which 4 are chosen, Qwen3-30B-A3B 128 and 8."""
    packed = {1: (8, 8, 1, 1, 8, 3), 8: (8, 8, 1, 1, 6, 4), 64: (16, 16, 1, 1, 6, 4), 512: (128, 64, 2, 1, 5, 1)}
    for tokens, tile in (packed | {8192: (256, 64, 2, 1, 3, 1)}).items():
        assert choose_packed(tokens, 4, 32, False).gate_up == tile
    assert choose_packed(1, 4, 32, False).down == (8, 8, 1, 2, 8, 3)
    assert [choose_plain(tokens, 8, 128) for tokens in (1, 8, 64)] == [None] * 3
    mixed = {128: Tiles(32, 64, 128, 4, 3), 256: Tiles(32, 64, 128, 4, 3), 512: Tiles(64, 64, 64, 4, 3)}
    for tokens, tiles in mixed.items():
        assert choose_plain(tokens, 8, 128) == MixedChoice(tiles, (64, 128, 4, 2))
    assert choose_plain(8192, 8, 128) == PlainChoice((128, 256, 4, 1), (128, 256, 4, 1))


EVERY_PLAIN = {choose_plain(tokens, 8, 128) for tokens in range(1, 9000, 3)} - {None}
EVERY_PACKED = {choose_packed(tokens, 4, 32, False) for tokens in range(1, 9000, 3)}


def test_tiles_fit():
    for choice in EVERY_PACKED:
        assert choice.gate_up[0] == choice.down[0], "the products share their rows"
        for rows, narrow, sides, split, stages, per_processor in choice:
            assert rows % narrow == 0 and stages * (rows * 256 + sides * (4096 + 256)) * per_processor < 227 * 1024
            if split > 1:  # one token's: of up to 16 experts with up to 16,384 outputs
                assert 16 * 256 * split * 64 * sides * rows <= SCRATCH_NUMBERS and MAX_SHARED_TILES >= 16 * 256


def test_blocks_fit_into_tiles():
    for choice in EVERY_PLAIN:
        block_m = choice.gate_up.block_m if isinstance(choice, MixedChoice) else choice.gate_up[0]
        assert block_m <= choice.down[0]


def test_the_fixed_choice_never_divides_k():
    for tokens in (1, 2, 8, 64, 512, 8192):
        assert all(tile[3] == 1 for tile in choose_packed(tokens, 4, 32, True))


def test_a_rehearsal_meets_every_choice():
    met = [
        choose_packed(count, 4, 32, False) for count in row_counts(lambda rows: choose_packed(rows, 4, 32, False), 9000)
    ]
    assert set(met) >= EVERY_PACKED and len(set(met)) == len(met)


# ── the compiler and the chip ───────────────────────────────────────────────────────────────────────

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.kernels.triton.moe import bf16_hopper, mxfp4_hopper

def compiled(kernel, types, values, options):
    names = [parameter.name for parameter in kernel.params]
    constants = dict(zip(names[-len(values):], values, strict=True))
    constants |= {name: None for name in ("scratch", "arrivals", "bias") if name in names and name not in types}
    floats = dict.fromkeys(("alpha", "limit", "offset"), "fp32")
    types = floats | types | {"out": "*bf16", "order": "*i32", "blocks": "*i32"} | dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, {name: types.get(name, "i32") for name in names}, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True})
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata.shared
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "setmaxnreg", "griddepcontrol.wait"):
        assert word in kernel.asm["ptx"], word
    return kernel.asm["ptx"]

def packed(tile, is_gated, is_gathered, is_early):
    layouts = {"x": ("bf16", [tile.narrow, 64], mxfp4_hopper.X_LAYOUT)}
    layouts["words"] = ("i32", [32, 32], mxfp4_hopper.WORDS_LAYOUT)
    layouts["exponents"] = ("i32", [16, 4], mxfp4_hopper.EXPONENTS_LAYOUT)
    types = {name: f"tensordesc<{kind}{block},{layout!r}>" for name, (kind, block, layout) in layouts.items()}
    types["bias"] = "*bf16"
    if tile.split > 1:
        types |= {"scratch": "*fp32", "arrivals": "*i32"}
    num_warps = 4 * min(2, tile.sides)
    options = {"num_warps": num_warps, "maxnreg": mxfp4_hopper.registers(num_warps, tile.per_processor)}
    values = tile.rows, tile.sides, tile.split, tile.stages, is_gated, is_gated, is_gathered, is_early, True
    assert "lop3.b32" in compiled(mxfp4_hopper._product, types, values, options)

def plain(tile, is_gated):
    piece = min(tile.wide // (2 if is_gated else 1), 128)
    blocks = {"x": [64, 64], "w": [piece, 64]}
    types = {name: f"tensordesc<bf16{block},{bf16_hopper.PANEL_LAYOUT!r}>" for name, block in blocks.items()}
    options = {"num_warps": tile.rows // 16, "maxnreg": bf16_hopper.registers(tile.rows // 16, tile.per_processor)}
    compiled(bf16_hopper._product, types, (tile.rows, tile.wide, tile.stages, is_gated, False, True, True), options)

packed(mxfp4_hopper.Tile(256, 64, 2, 1, 3, 1), True, True, True)
packed(mxfp4_hopper.Tile(8, 8, 1, 2, 8, 3), False, True, True)
plain(bf16_hopper.Tile(128, 256, 4, 1), True)
"""


def test_compiles_for_the_chip():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")


def expected(x, logits, num_chosen, weights, biases, gate, residual, held=None):
    """The weighted sums in float32, of plain weights [E, N, K]."""
    alpha, limit, offset = gate
    chosen, shares = choose(logits, num_chosen, True)
    first, count = held or (0, logits.shape[1])
    y = residual.float().clone()
    for expert in range(count):
        token, place = (chosen == first + expert).nonzero(as_tuple=True)
        inner = F.linear(x[token].float(), weights[0][expert], biases[0][expert].float())
        part, up = inner.chunk(2, dim=1)
        if limit:
            part, up = part.clamp(max=limit), up.clamp(-limit, limit)
        inner = part * torch.sigmoid(alpha * part) * (up + offset)
        y.index_add_(
            0, token, F.linear(inner, weights[1][expert], biases[1][expert].float()) * shares[token, place, None]
        )
    return y


def some(num_tokens, num_experts, depth, device):
    torch.manual_seed(num_tokens)
    x, residual = (torch.randn(num_tokens, depth, device=device).bfloat16() for _ in range(2))
    return x, torch.randn(num_tokens, num_experts, device=device).bfloat16(), residual


def distance(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def make_packed(num_experts, depth, inner, device):
    gate_up, plain_gate_up = pack([quants(2 * inner, depth, seed) for seed in range(num_experts)], depth, True, device)
    down, plain_down = pack([quants(depth, inner, 99 + seed) for seed in range(num_experts)], inner, False, device)
    torch.manual_seed(0)
    biases = tuple(torch.randn(num_experts, rows, device=device).bfloat16() for rows in (2 * inner, depth))
    return (gate_up, down), (plain_gate_up, plain_down), biases


@pytest.mark.gpu
@pytest.mark.parametrize("choice", sorted(EVERY_PACKED), ids=str)
@pytest.mark.parametrize(("depth", "inner"), [(288, 160), (512, 384)])
def test_packed_experts(choice, depth, inner, device):
    on_hopper()
    weights, plain, biases = make_packed(8, depth, inner, device)
    counts = (1,) if choice.down[3] > 1 else (1, 3, 40, 300, 1500)
    for num_tokens in counts:
        for held in (None, (0, 8)):
            x, logits, residual = some(num_tokens, 8, depth, device)
            routing = Routing(logits, 2, True, held)
            wanted = expected(x, logits, 2, plain, biases, GATE, residual)
            outs = [packed_experts(x, routing, *weights, biases, GATE, residual.clone(), choice) for _ in range(2)]
            assert distance(outs[0], wanted) < 8e-3 and torch.equal(*outs)


@pytest.mark.gpu
def test_experts_that_are_elsewhere_count_as_zeros(device):
    on_hopper()
    weights, plain, biases = make_packed(4, 256, 128, device)
    for num_tokens in (1, 5, 700):
        x, logits, residual = some(num_tokens, 8, 256, device)
        wanted = expected(x, logits, 2, plain, biases, GATE, residual, (3, 4))
        choice = choose_packed(num_tokens, 2, 8, False)
        routing = Routing(logits, 2, True, (3, 4))
        assert distance(packed_experts(x, routing, *weights, biases, GATE, residual, choice), wanted) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_fixed_choice_gives_a_row_the_same_bits_in_every_batch(is_normalised, device):
    on_hopper()
    weights, _, biases = make_packed(8, 288, 160, device)
    x, logits, residual = some(3000, 8, 288, device)

    def run(count):
        routing = Routing(logits[:count], 4, is_normalised)
        choice = choose_packed(count, 4, 8, True)
        return packed_experts(x[:count], routing, *weights, biases, GATE, residual[:count].clone(), choice)

    everything = run(3000)
    for count in (1, 2, 8, 30, 64, 200, 900, 2100):
        assert torch.equal(run(count), everything[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("depth", "inner"), [(264, 200), (512, 384)])
def test_plain_experts(dtype, depth, inner, device):
    on_hopper()
    torch.manual_seed(1)
    weights = tuple(
        (torch.randn(8, *shape, device=device) / 16).to(dtype) for shape in ((2 * inner, depth), (depth, inner))
    )
    biases = tuple(torch.randn(8, rows, device=device).to(dtype) for rows in (2 * inner, depth))
    plain = tuple(weight.float() for weight in weights)
    for num_tokens in (1, 40, 300, 1500):
        for gate in (GATE, (1.0, 0.0, 0.0)):
            x, logits, residual = (part.to(dtype) for part in some(num_tokens, 8, depth, device))
            wanted = expected(x, logits, 2, plain, biases, gate, residual)
            for choice in sorted(EVERY_PLAIN, key=str):
                compute = mixed_experts if isinstance(choice, MixedChoice) else plain_experts
                outs = [
                    compute(x, Routing(logits, 2, True), *weights, biases, gate, residual.clone(), choice)
                    for _ in range(2)
                ]
                assert distance(outs[0], wanted) < 8e-3 and torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_a_graph_serves_every_routing(num_tokens, device):
    on_hopper()
    weights, _, biases = make_packed(8, 288, 160, device)
    x, logits, residual = some(num_tokens, 8, 288, device)
    choice = choose_packed(num_tokens, 2, 8, False)

    def step():
        return packed_experts(x, Routing(logits, 2, True), *weights, biases, GATE, residual.clone(), choice)

    step()  # the first call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(x.shape))
        logits.copy_(torch.randn(logits.shape))
        if seed == 2:
            logits[:, 3:5] += 50  # route all tokens to the same two
        graph.replay()
        assert torch.equal(captured, step())


def test_where_there_is_no_chip():
    assert not grouped.can_run(torch.device("cpu"))
    assert isinstance(choose_packed(5, 2, 8, False), PackedChoice)
