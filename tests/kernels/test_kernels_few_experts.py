"""Experts of a few tokens: norm and router in Triton, the products in Gluon on a model of the chip, and compiled. On a GPU they run,
too."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.runtime.launch import knows_gluon

if not knows_gluon():
    pytest.skip("this Triton's Gluon is another", allow_module_level=True)

from octavo.kernels.device_ops import NormWeights
from octavo.kernels.triton.gemm import stream_parts
from octavo.kernels.triton.moe import bf16_few, few_parts, grouped, mxfp4_few
from octavo.kernels.triton.moe.bf16_few import FewTiles
from octavo.kernels.triton.moe.few_route import route
from octavo.kernels.triton.moe.mxfp4_few import X_SCALE, PackedFewTiles, width_for
from octavo.weights.methods.base import ExpertsRequest, Gate, RouterWeights
from octavo.weights.methods.torch_experts import choose
from octavo.weights.methods.triton_experts import TritonExperts
from octavo.weights.methods.triton_mxfp4 import HopperMxfp4Experts
from tests.contexts import context
from tests.kernels import gluon_model
from tests.kernels.gluon_model import BFloat16, Number, Pointer
from tests.kernels.test_kernels_grouped_experts import GATE, pack, quants

PLAIN_GATE = (1.0, 0.0, 0.0)
PARTS = {
    name: value
    for module in (stream_parts, few_parts)
    for name, value in vars(module).items()
    if not name.startswith("__")
}


def some(*shape):
    return (torch.randn(shape) * 0.3).bfloat16()


def in_fragments(x):
    """Columns 64 a + 16 b + 8 c + 2 d + e, as route() leaves them."""
    return x.view(len(x), -1, 2, 4, 2, 4, 2).permute(0, 1, 5, 3, 4, 2, 6).reshape(x.shape).contiguous()


def distance(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def logits_of(keys, num_experts):
    """What the keys hold, of experts."""
    order = keys[:, :num_experts].cpu() >> 16
    bits = torch.where(order >= 0, order, order ^ 0x7FFF) << 16
    return torch.where(order == -32767, float("nan"), bits.view(torch.float32))


def keys_of(logits):
    """By their definition: in the order of the logits, the first of equal ones the largest."""
    num_tokens, num_experts = logits.shape
    keys = torch.full((num_tokens, 1 << (num_experts - 1).bit_length()), -32768 * 65536, dtype=torch.int64)
    bits = (logits.bfloat16().float() + 0.0).view(torch.int32).long() >> 16
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFF)
    keys[:, :num_experts] = torch.where(logits.isnan(), -32767, order) * 65536
    return (keys + 65535 - torch.arange(keys.shape[1])).to(torch.int32)


def expected(x, logits, num_chosen, is_normalised, weights, biases, gate, residual):
    """The weighted sums in float32."""
    alpha, limit, offset = gate
    chosen, shares = choose(logits, num_chosen, is_normalised)
    y = residual.float().clone()
    for token in range(len(x)):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            of_expert = [None if bias is None else bias[expert].float() for bias in biases]
            part, up = F.linear(x[token].float(), weights[0][expert].float(), of_expert[0]).chunk(2)
            if limit:
                part, up = part.clamp(max=limit), up.clamp(-limit, limit)
            inner = part * torch.sigmoid(alpha * part) * (up + offset)
            y[token] += share * F.linear(inner, weights[1][expert].float(), of_expert[1])
    return y


# ── norm and router ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "depth", "width", "in_order"),
    [(1, 8, 256, 256, False), (3, 12, 200, 384, True), (2, 5, 72, 72, False), (1, 128, 2880, 3072, True)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_and_router(num_tokens, num_experts, depth, width, in_order, has_bias, device):
    torch.manual_seed(depth)
    x, weight, router = (some(*shape).to(device) * 3 for shape in ((num_tokens, depth), (depth,), (num_experts, depth)))
    bias = some(num_experts).to(device) if has_bias else None
    normed, keys = route(x, (weight, 1e-5), router, bias, width, in_order)
    wanted = F.rms_norm(x.float(), (depth,), weight.float(), 1e-5).bfloat16()
    whole = F.pad(wanted, (0, width - depth))
    found = normed.cpu().float()
    torch.testing.assert_close(found, (in_fragments(whole) if in_order else whole).cpu().float(), rtol=8e-3, atol=1e-6)
    exact = F.linear(wanted.float(), router.float(), None if bias is None else bias.float()).cpu()
    torch.testing.assert_close(logits_of(keys, num_experts), exact, rtol=6e-3, atol=0.05)
    # A key has no other numbers than its logit's and its expert's; what is no expert comes last.
    assert torch.equal(keys.cpu() & 65535, 65535 - torch.arange(keys.shape[1], dtype=torch.int32).expand_as(keys))
    assert bool((keys.cpu()[:, num_experts:] < -32767 * 65536).all())


def test_keys_are_in_the_order_of_logits(device):
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
    values = [3.0, -0.0, 0.0, float("-inf"), -2.0, float("nan"), 3.0, float("inf"), 1e-30, -1e30]
    router = torch.zeros(len(values), 16, dtype=torch.bfloat16, device=device)
    bias = torch.tensor(values, dtype=torch.bfloat16, device=device)
    _, keys = route(x, (torch.ones(16, dtype=torch.bfloat16, device=device), 1e-5), router, bias, 16, False)
    assert keys[0].cpu().argsort(descending=True).tolist()[:10] == [7, 0, 6, 8, 1, 2, 4, 9, 3, 5]
    assert torch.equal(keys.cpu(), keys_of(torch.tensor([values])))


# ── the products, on a model ────────────────────────────────────────────────────────────────────────


def pointer(tensor):
    if tensor is None:
        return None
    made = Pointer(tensor.float().numpy().reshape(-1) if tensor.dtype == torch.bfloat16 else tensor.numpy().reshape(-1))
    if tensor.dtype == torch.bfloat16:
        made.dtype.element_ty = BFloat16
    return made


def words(tensor):
    return Pointer(tensor.contiguous().view(torch.int32).numpy().reshape(-1))


def of(found, shape):
    return torch.from_numpy(found.numbers.reshape(shape).astype(np.float32))


def make_plain(num_experts, depth, inner, has_bias):
    biases = (some(num_experts, 2 * inner), some(num_experts, depth)) if has_bias else (None, None)
    return (some(num_experts, 2 * inner, depth), some(num_experts, depth, inner)), biases


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "depth", "inner", "has_bias", "is_normalised", "tiles"),
    [
        (1, 8, 2, 512, 256, True, True, FewTiles(4, 3, 3, 4, 2, 2)), (2, 5, 3, 264, 40, False, False, FewTiles(2, 2, 1, 8, 1, 5)),
        (3, 16, 4, 256, 320, True, False, FewTiles(4, 1, 8, 2, 1, 1)), (1, 4, 1, 40, 600, False, True, FewTiles(8, 2, 2, 1, 2, 9)),
    ],
)  # fmt: skip
def test_plain_experts_on_a_model(tokens, experts, chosen, depth, inner, has_bias, is_normalised, tiles):
    torch.manual_seed(inner)
    weights, biases = make_plain(experts, depth, inner, has_bias)
    gate = GATE if has_bias else PLAIN_GATE
    x, logits, residual = some(tokens, depth) * 3, (torch.randn(tokens, experts) * 2).bfloat16(), some(tokens, depth)
    wanted = expected(x, logits, chosen, is_normalised, weights, biases, gate, residual)
    keys = keys_of(logits.float())
    count = keys.shape[1]
    between = pointer(torch.full((tokens * chosen, inner), float("nan"), dtype=torch.bfloat16))
    chunks = -(-depth // 256) * tiles.gate_steps
    args = (
        pointer(x), pointer(keys), pointer(weights[0]), pointer(biases[0]), between, *gate, count, chosen, depth, inner, bool(gate[1]),
        tiles.gate_warps, tiles.gate_steps, min(tiles.gate_ahead, chunks), True,
    )  # fmt: skip
    programs = -(-inner // (tiles.gate_warps * tiles.gate_steps)) * tokens * chosen
    gluon_model.run("_gate_up", PARTS | vars(bf16_few), programs, 1, args)
    out = pointer(residual)
    warps = tiles.down_share << (chosen - 1).bit_length()
    chunks = -(-inner // (256 * tiles.down_share)) * tiles.down_rows
    args = (
        between, pointer(keys), pointer(weights[1]), pointer(biases[1]), out, Number(experts), count, chosen, is_normalised, depth, inner,
        warps, tiles.down_rows, tiles.down_share, min(tiles.down_ahead, chunks), True,
    )  # fmt: skip
    gluon_model.run("_down", PARTS | vars(bf16_few), -(-depth // tiles.down_rows) * tokens, 1, args)
    assert distance(of(out, (tokens, depth)), wanted) < 5e-3


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "depth", "inner", "is_normalised", "tiles"),
    [
        (1, 6, 2, 416, 160, True, PackedFewTiles(2, 3, 0, 2, 1, 0)), (2, 4, 4, 256, 288, False, PackedFewTiles(4, 2, 0, 1, 2, 0)),
        (1, 8, 1, 96, 416, True, PackedFewTiles(1, 9, 0, 2, 3, 0)),
    ],
)  # fmt: skip
def test_packed_experts_on_a_model(tokens, experts, chosen, depth, inner, is_normalised, tiles):
    torch.manual_seed(inner)
    gate_up, plain_gate_up = pack([quants(2 * inner, depth, seed) for seed in range(experts)], depth, True, "cpu")
    down, plain_down = pack([quants(depth, inner, 99 + seed) for seed in range(experts)], inner, False, "cpu")
    biases = (some(experts, 2 * inner), some(experts, depth))
    x, logits, residual = some(tokens, depth) * 3, (torch.randn(tokens, experts) * 2).bfloat16(), some(tokens, depth)
    wanted = expected(x, logits, chosen, is_normalised, (plain_gate_up, plain_down), biases, GATE, residual)
    keys = keys_of(logits.float())
    count, width = keys.shape[1], width_for(depth, 1)
    between_width = width_for(inner, tiles.down_share)
    between = pointer(torch.full((tokens * chosen, between_width), float("nan"), dtype=torch.bfloat16))
    args = (
        words(in_fragments(F.pad(x * X_SCALE, (0, width - depth)))), pointer(keys), words(gate_up.words), words(gate_up.exponents),
        pointer(biases[0]), between, *GATE, Number(inner), count, chosen, gate_up.words.shape[2], width, between_width,
        min(tiles.gate_ahead, gate_up.words.shape[2]), True, tiles.gate_warps, True,
    )  # fmt: skip
    programs = -(-between_width // (8 * tiles.gate_warps))
    gluon_model.run("_gate_up", PARTS | vars(mxfp4_few), programs * tokens * chosen, 1, args)
    found = of(between, (tokens * chosen, between_width)).bfloat16()
    assert not found.isnan().any(), "every number is written that is read"
    out, warps = pointer(residual), tiles.down_share * chosen
    args = (
        words(found), pointer(keys), words(down.words), words(down.exponents), pointer(biases[1]), out,
        *map(Number, (depth, experts, down.words.shape[1])), count, chosen, is_normalised, down.words.shape[2], between_width,
        tiles.down_share, min(tiles.down_ahead, -(-down.words.shape[2] // tiles.down_share)), warps, True,
    )  # fmt: skip
    gluon_model.run("_down", PARTS | vars(mxfp4_few), -(-depth // 16) * tokens, 1, args)
    assert distance(of(out, (tokens, depth)), wanted) < 5e-3


# ── which ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_shapes_that_were_measured_are_taken_up_to_the_tokens_that_gained():
    """`benchmarks/kernels/experts.py` on an H200: Qwen3-30B-A3B and gpt-oss-20b."""
    plain, packed = grouped.choose_few_plain, grouped.choose_few_packed
    assert [tokens for tokens in range(1, 10) if plain(tokens, 8, 128, 2048, 768)] == [1, 2, 3, 4]
    assert [tokens for tokens in range(1, 10) if packed(tokens, 4, 32, 2880, 2880)] == [1, 2]
    assert (
        plain(1, 2, 8, 4096, 14336) is None
        and plain(1, 8, 128, 4096, 768) is None
        and plain(1, 8, 256, 2048, 512) is None
    )
    assert packed(1, 8, 32, 2880, 2880) is None and packed(1, 4, 32, 1024, 512) is None


def test_elsewhere_and_with_deterministic_nothing_is_taken(device):
    """There norm, router and experts are computed one after the other."""
    x = some(1, 2880).to(device)
    before = x.clone()
    norm = NormWeights(some(2880).to(device), None, 1e-5)
    router = RouterWeights(some(4, 2880).to(device), None)
    settings = context(dtype=torch.bfloat16, device=device, kernels="invariant").methods.settings
    for hold, inner in ((TritonExperts, 768), (HopperMxfp4Experts, 2880)):
        held = hold(ExpertsRequest(4, 2880, inner, Gate()), settings)
        assert held.sum_of_few(x, norm, router, 4, True) is None and torch.equal(x, before)


# ── the compiler and the chip ───────────────────────────────────────────────────────────────────────

COMPILE = """
import subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.kernels.triton.moe import bf16_few, mxfp4_few
from octavo.kernels.triton.moe.bf16_few import FewTiles
from octavo.kernels.triton.moe.grouped import choose_few_packed, choose_few_plain
from octavo.kernels.triton.moe.mxfp4_few import PackedFewTiles

def check(kernel, types, warps, registers, values):
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in signature[name] or name == "n"}
    constants = dict(zip(names[-len(values):], values, strict=True)) | {name: None for name in ("bias",) if name not in types}
    source = GluonASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "maxnreg": registers, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    for word in ("griddepcontrol.wait", "ld.global.v4"):
        assert word in made.asm["ptx"], word
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said, (kernel.__name__, said)

gate = dict.fromkeys(("alpha", "limit", "offset"), "fp32")
floats = {name: "*bf16" for name in ("x", "weight", "out", "inner")} | {"keys": "*i32", "num_experts": "i32"}
words = {name: "*i32" for name in ("x", "keys", "words", "exponents", "inner")}
words |= {"bias": "*bf16", "out": "*bf16"} | dict.fromkeys(("n", "num_experts", "height"), "i32")

t = FewTiles(*choose_few_plain(1, 8, 128, 2048, 768))
values = 128, 8, 2048, 768, False, t.gate_warps, t.gate_steps, t.gate_ahead, True
check(bf16_few._gate_up, {**floats, **gate}, t.gate_warps, t.gate_registers, values)
warps = 8 * t.down_share
values = 128, 8, True, 2048, 768, warps, t.down_rows, t.down_share, t.down_ahead, True
check(bf16_few._down, floats, warps, t.down_registers, values)
t = PackedFewTiles(*choose_few_packed(1, 4, 32, 2880, 2880))
check(mxfp4_few._gate_up, {**words, **gate}, t.gate_warps, t.gate_registers, (32, 4, 23, 3072, 3200, t.gate_ahead, True, t.gate_warps, True))
warps = 4 * t.down_share
check(mxfp4_few._down, words, warps, t.down_registers, (32, 4, True, 23, 3200, t.down_share, t.down_ahead, warps, True))
"""


def test_compiles_for_the_chip_without_spilling():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")


def compute(x, around, num_chosen, is_normalised, weights, biases, gate, tiles):
    is_packed = isinstance(tiles, PackedFewTiles)
    of_few = grouped.packed_experts_of_few if is_packed else grouped.plain_experts_of_few
    return of_few(x.clone(), *around, num_chosen, is_normalised, *weights, biases, gate, tiles)


def check(x, around, num_chosen, is_normalised, weights, exact, biases, gate, tiles):
    """Against float32 with the experts that route() finds, twice, and in a graph that then meets another routing."""
    (norm, epsilon), (router, bias) = around

    def wanted():
        routed = route(x, (norm, epsilon), router, bias, x.shape[1], False)
        logits = logits_of(routed.keys, len(router)).to(x.device)
        return expected(routed.normed, logits, num_chosen, is_normalised, exact, biases, gate, x)

    def run():
        return compute(x, around, num_chosen, is_normalised, weights, biases, gate, tiles)

    out = run()
    assert distance(out, wanted()) < 6e-3 and torch.equal(out, run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn(x.shape))
    graph.replay()
    assert distance(captured, wanted()) < 6e-3 and torch.equal(captured, run())


def make_around(num_experts, depth, has_bias, device):
    norm, router = some(depth).to(device) + 1, some(num_experts, depth).to(device)
    return (norm, 1e-5), (router, some(num_experts).to(device) if has_bias else None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(
    ("experts", "chosen", "depth", "inner", "has_bias", "is_normalised"),
    [(128, 8, 2048, 768, False, True), (60, 6, 1000, 344, True, False), (8, 2, 512, 1024, True, True)],
)
def test_plain_experts(tokens, experts, chosen, depth, inner, has_bias, is_normalised, device):
    on_hopper()
    torch.manual_seed(tokens)
    (gate_up, down), biases = make_plain(experts, depth, inner, has_bias)
    weights = gate_up.to(device), down.to(device)
    biases = tuple(None if bias is None else bias.to(device) for bias in biases)
    around = make_around(experts, depth, has_bias, device)
    x = torch.randn(tokens, depth, device=device).bfloat16()
    for tiles in (
        FewTiles(*grouped.choose_few_plain(1, 8, 128, 2048, 768)),
        FewTiles(4, 2, 3, 2, 1, 1),
        FewTiles(16, 1, 9, 4, 2, 5),
    ):
        check(x, around, chosen, is_normalised, weights, weights, biases, GATE if has_bias else PLAIN_GATE, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(
    ("experts", "chosen", "depth", "inner"), [(8, 4, 2880, 2880), (6, 2, 416, 160), (40, 1, 288, 96)]
)
def test_packed_experts(tokens, experts, chosen, depth, inner, device):
    on_hopper()
    torch.manual_seed(tokens)
    gate_up, plain_gate_up = pack([quants(2 * inner, depth, seed) for seed in range(experts)], depth, True, device)
    down, plain_down = pack([quants(depth, inner, 99 + seed) for seed in range(experts)], inner, False, device)
    biases = (some(experts, 2 * inner).to(device), some(experts, depth).to(device))
    around = make_around(experts, depth, True, device)
    x = torch.randn(tokens, depth, device=device).bfloat16()
    for tiles in (
        PackedFewTiles(*grouped.choose_few_packed(1, 4, 32, 2880, 2880)),
        PackedFewTiles(8, 3, 128, 1, 4, 128),
    ):
        check(x, around, chosen, True, (gate_up, down), (plain_gate_up, plain_down), biases, GATE, tiles)
