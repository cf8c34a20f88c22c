"""8-bit weights on a GPU: how close products and a whole model stay to 16-bit ones, in graphs too, and the memory of loading."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import RMSNorm
from octavo.models import load_family
from octavo.weights.methods.base import WeightRequest
from octavo.weights.methods.torch_fp8 import Fp8Weight, check_fp8, quantise
from octavo.worker.weights import fp8_saving
from tests.contexts import context
from tests.models import checkpoints
from tests.models.batches import Store, make_batch
from tests.models.walk import prompts, tensors

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
ROWS = [1, 3, 16, 17, 257]


def context_of(kernels: str = "triton", dtype: torch.dtype = torch.bfloat16, quantization: str = "fp8") -> BuildContext:
    return context(dtype=dtype, device=GPU, kernels=kernels, quantization=quantization)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_this_gpu_is_allowed() -> None:
    check_fp8(GPU, torch.bfloat16)
    check_fp8(GPU, torch.float16)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(48, 64), (1024, 2048), (6144, 4096), (4096, 14336)])
def test_products_are_near(n: int, k: int, num_rows: int) -> None:
    torch.manual_seed(n)
    x, weight, residual = randn(num_rows, k), randn(n, k) * 0.02, randn(num_rows, n)
    column, row = ColumnLinear(k, (n,), context_of()), RowLinear(k, n, context_of())
    column.fill_weight(0, weight)
    row.fill_weight(weight)
    assert 0.001 < error(column(x), F.linear(x, weight)) < 0.05
    assert 0.001 < error(row(x, residual.clone()) - residual, F.linear(x, weight)) < 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", ROWS)
def test_norm_gate_and_bias(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    context = context_of(dtype=dtype)
    x, weight, bias = randn(num_rows, 512, dtype=dtype) * 5, randn(768, 512, dtype=dtype), randn(768, dtype=dtype)
    norm = RMSNorm(512, 1e-5, context)
    norm.weight.copy_(torch.linspace(0.5, 2, 512))
    column = ColumnLinear(512, (768,), context, bias=True)
    column.fill_weight(0, weight)
    column.fill_bias(0, bias)
    found = column(x, norm)
    assert found.dtype == dtype
    assert 0.001 < error(found, F.linear(norm(x), weight, bias)) < 0.05

    down = randn(256, 384, dtype=dtype)
    row = RowLinear(384, 256, context)
    row.fill_weight(down)
    gate_up, residual = randn(num_rows, 768, dtype=dtype), randn(num_rows, 256, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = F.linear(F.silu(gate) * up, down.float()) + residual
    assert 0.001 < error(row.after_gate(gate_up, "silu", residual.clone()), expected) < 0.05


def test_kernels_round_as_torch_does() -> None:
    from octavo.kernels.triton.elementwise.quantise import quantise_rows

    torch.manual_seed(1)
    x = randn(300, 1000) * torch.logspace(-4, 4, 300, device=GPU)[:, None].bfloat16()
    x[7] = 0
    largest = x.double().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    exact = x.double() * 448 / largest
    # Two roundings to 24 bits, of which a kernel's division may be off by two units (div.full.f32), a product by half a unit:
    # a value halfway between two 8-bit ones, as x of 8 bits often is (about 1 of 200), may round either way; others may not.
    slack = 3 * 2.0**-23
    either = [(exact * (1 + sign * slack)).float().to(torch.float8_e4m3fn).float() for sign in (-1, 1)]
    low, high = torch.minimum(*either), torch.maximum(*either)
    assert (low == high).float().mean() > 0.98
    for numbers, scales in (quantise_rows(x), quantise(x)):
        torch.testing.assert_close(scales.double(), largest / 448, rtol=slack, atol=0)
        assert ((low <= numbers.float()) & (numbers.float() <= high)).all()


def test_a_broken_row_breaks_no_other() -> None:
    torch.manual_seed(2)
    layer = ColumnLinear(256, (128,), context_of())
    layer.fill_weight(0, randn(128, 256))
    x = randn(20, 256)
    expected = layer(x)
    x[3, 5], x[11, 0] = float("nan"), float("inf")
    x[12] = 0
    found = layer(x)
    others = [row for row in range(20) if row not in (3, 11, 12)]
    assert torch.equal(found[others], expected[others])
    assert (found[12] == 0).all()


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_products_can_be_captured(num_rows: int) -> None:
    torch.manual_seed(3)
    context = context_of()
    layer, norm = ColumnLinear(1024, (2048, 512), context), RMSNorm(1024, 1e-6, context)
    norm.weight.fill_(1.0)
    for part, size in enumerate((2048, 512)):
        layer.fill_weight(part, randn(size, 1024))
    x = randn(num_rows, 1024)
    layer(x, norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, norm)
    for _ in range(2):
        x.copy_(randn(num_rows, 1024))
        graph.replay()
        torch.testing.assert_close(out, layer(x, norm))


def test_loading_holds_no_copy_in_16_bits() -> None:
    settings, request = context_of("").methods.settings, WeightRequest((14336,), 4096)
    tensor = randn(14336, 4096)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = [Fp8Weight(request, settings) for _ in range(4)]
    for weight in weights:
        weight.fill(0, tensor)
    held = torch.cuda.memory_allocated() - before
    assert held < 4 * 14336 * (4096 + 4) + (1 << 22)
    assert torch.cuda.max_memory_allocated() - before - held < 256 << 20


# ── a whole model ───────────────────────────────────────────────────────────────────────────────────


def logits_of(reference: Any, quantization: str, tokens: list[int]) -> tuple[torch.Tensor, int, int]:
    config = reference.config.to_dict()
    family, context = load_family(config["model_type"]), context_of(quantization=quantization)
    spec = family.spec(config)
    model = family.Model(config, spec, context)
    model.load((name, tensor.to(GPU)) for name, tensor in tensors(reference))
    store = Store(spec, context.attention, dtype=torch.bfloat16)
    context.attention.bind([kv.to(GPU) for kv in store.kv], 8)
    batch = make_batch([(store.row(tokens), len(tokens))], store.page_size)
    moved = {
        field.name: value.to(GPU)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    with torch.inference_mode():
        logits = model.logits(model.forward(dataclasses.replace(batch, **moved)))
    return logits.float(), model.weights_bytes, fp8_saving(model, torch.bfloat16)


@pytest.mark.parametrize("make", [checkpoints.llama, checkpoints.qwen3])
def test_a_model_in_8_bits(make: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    reference = make(**sizes, head_dim=64, tie_word_embeddings=make is checkpoints.qwen3)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(0.3)  # as in trained models, each layer adds little to its input
    (tokens,) = prompts(seed=4, lengths=(90,), vocab_size=512)
    expected, plain_bytes, saving = logits_of(reference, "", tokens)
    found, num_bytes, _ = logits_of(reference, "fp8", tokens)
    assert 0.001 < error(found, expected) < 0.15
    divergence = F.kl_div(found.log_softmax(-1), expected.softmax(-1), reduction="batchmean")
    assert divergence < 0.05
    assert plain_bytes - num_bytes == saving > 0
