"""Weights in 8 bits: how near products stay, what they take, over parts and ranks, and where they are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.layers.linear import ColumnLinear, Linear, RowLinear
from octavo.layers.model import DecoderModel
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.sharding import share
from octavo.models import load_family
from octavo.parallel import Group
from octavo.weights.methods.torch_fp8 import Fp8Weight, check_fp8, quantise, saving
from octavo.worker.weights import fp8_saving
from tests.contexts import context
from tests.models import checkpoints
from tests.models.batches import Store
from tests.models.walk import prompts, tensors, walk

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def context_of(rank: int = 0, size: int = 1, quantization: str = "fp8", kernels: str = "") -> Any:
    group = Group.single()
    group.rank, group.size = rank, size
    dtype = torch.bfloat16 if kernels else torch.float32
    return context(group, dtype, kernels=kernels, quantization=quantization)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_every_number_keeps_four_bits_of_its_row() -> None:
    torch.manual_seed(1)
    rows = torch.randn(50, 300) * torch.logspace(-6, 6, 50)[:, None]
    rows[7] = 0
    rows[8, 1:] = 0
    numbers, scales = quantise(rows)
    assert numbers.dtype == FP8 and scales.shape == (50, 1)
    assert numbers.float().abs().amax(dim=1).tolist() == [0.0 if row == 7 else 448.0 for row in range(50)]
    allowed = (
        torch.maximum(rows.abs() / 16, scales * 2.0**-10) * 1.0001
    )  # half a step of three bits, or of the smallest
    assert ((numbers.float() * scales - rows).abs() <= allowed).all()
    assert error(numbers.float() * scales, rows) < 0.03


def test_16_bit_rows_are_rounded_once() -> None:
    rows = torch.randn(20, 64).to(torch.bfloat16)
    for found, expected in zip(quantise(rows), quantise(rows.float()), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_a_column_product(bias: bool) -> None:
    torch.manual_seed(2)
    x, weights, biases = torch.randn(5, 64), [torch.randn(48, 64), torch.randn(32, 64) * 100], torch.randn(2, 48)
    layer = ColumnLinear(64, (48, 32), context_of(), bias=bias)
    for part, weight in enumerate(weights):
        layer.fill_weight(part, weight)
        if bias:
            layer.fill_bias(part, biases[part, : len(weight)])
    found = layer(x).split((48, 32), dim=1)
    for part, weight in enumerate(
        weights
    ):  # each by itself: the second is so much larger that the first would not show
        expected = x @ weight.t() + (biases[part, : len(weight)] if bias else 0)
        assert 0.001 < error(found[part], expected) < 0.05
    assert isinstance(layer.weight, Fp8Weight)
    assert layer.weight.nbytes == 80 * 64 + 80 * 4


def test_large_weights_are_rounded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    weight, found = torch.randn(80, 64), []
    for at_once in (1 << 24, 64 * 7, 1):
        monkeypatch.setattr("octavo.weights.methods.torch_fp8._AT_ONCE", at_once)
        layer = ColumnLinear(64, (80,), context_of())
        layer.fill_weight(0, weight)
        assert isinstance(layer.weight, Fp8Weight)
        found.append((layer.weight.numbers.float(), layer.weight.scales))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_ranks_share_a_row_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias and residual are counted once, and each rank's scales fit its own columns."""
    torch.manual_seed(4)
    x, weight, bias, residual = torch.randn(3, 64), torch.randn(48, 64), torch.randn(48), torch.randn(3, 48)
    weight[:, 32:] *= 1000
    x[:, 32:] /= 1000
    total = torch.zeros(3, 48)
    for rank in range(2):
        context = context_of(rank, 2)
        monkeypatch.setattr(context.group, "all_reduce", lambda tensor: tensor)
        layer = RowLinear(64, 48, context, bias=True)
        for name, slot in layer.weight_slots("o").items():
            slot.store(weight if name == "o.weight" else bias)
        total += layer(share(x, 1, context.group), residual)
    assert 0.001 < error(total, residual + x @ weight.t() + bias) < 0.05


def test_a_norm_comes_first() -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(4, 64) * 30, torch.randn(48, 64)
    for kind in (RMSNorm, LayerNorm):
        norm = kind(64, 1e-5, context_of())
        for name, slot in norm.weight_slots("n").items():
            slot.store(torch.linspace(0.5, 2, 64) if name.endswith("weight") else torch.ones(64))
        layer = ColumnLinear(64, (48,), context_of())
        layer.fill_weight(0, weight)
        assert 0.001 < error(layer(x, norm), norm(x) @ weight.t()) < 0.05


def test_an_activation_comes_last() -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(4, 64), torch.randn(48, 64) / 8
    layer = ColumnLinear(64, (48,), context_of())
    layer.fill_weight(0, weight)
    assert 0.001 < error(layer(x, None, "gelu_tanh"), F.gelu(x @ weight.t(), approximate="tanh")) < 0.05


@pytest.mark.parametrize(("inner", "width"), [(64, 50), (60, 48)])
def test_a_weight_that_is_no_multiple_of_16_stays_as_it_comes(inner: int, width: int) -> None:
    x, weight = torch.randn(4, inner), torch.randn(width, inner)
    layer = ColumnLinear(inner, (width,), context_of())
    layer.fill_weight(0, weight)
    assert layer.weight.name == "float32" and saving(layer.request, torch.bfloat16) == 0
    torch.testing.assert_close(layer(x), x @ weight.t())


@pytest.mark.parametrize("kernels", ["triton", "invariant"])
def test_kernels_round_what_torch_does(kernels: str) -> None:
    """The layers' way through the kernels, in the interpreter; how near its rounding is, their own tests say."""
    pytest.importorskip("triton")
    torch.manual_seed(7)
    context = context_of(kernels=kernels)
    x, weight, residual = (torch.randn(*shape).bfloat16() for shape in ((3, 64), (48, 64), (3, 48)))
    norm = RMSNorm(64, 1e-5, context)
    norm.weight.copy_(torch.linspace(0.5, 2, 64))
    normed = F.rms_norm(x, (64,), norm.weight, 1e-5)
    column, row = ColumnLinear(64, (48,), context), RowLinear(64, 48, context)
    column.fill_weight(0, weight)
    row.fill_weight(weight)
    gate_up = torch.randn(3, 128).bfloat16()
    gate, up = gate_up.float().chunk(2, dim=1)
    for found, expected in (
        (column(x), F.linear(x, weight)),
        (column(x, norm), F.linear(normed, weight)),
        # A product may be added to the residual in place.
        (row(x, residual.clone()), F.linear(x, weight) + residual),
        (row.after_gate(gate_up, "silu", residual.clone()), F.linear(F.silu(gate) * up, weight.float()) + residual),
    ):
        assert found.dtype == torch.bfloat16
        assert 0.001 < error(found, expected) < 0.1  # the interpreter rounds some numbers wrongly


def model_of(name: str, quantization: str) -> tuple[DecoderModel, Store, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 192}
    make = {"llama": checkpoints.llama, "qwen3": checkpoints.qwen3}[name]
    reference = make(**sizes, head_dim=32, tie_word_embeddings=name == "qwen3")
    family, config = load_family(name), reference.config.to_dict()
    spec, context = family.spec(config), context_of(quantization=quantization)
    ours = family.Model(config, spec, context)
    ours.load(tensors(reference))
    return ours, Store(spec, context.attention), reference


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_in_8_bits(name: str) -> None:
    (plain, plain_store, _), (ours, store, _) = model_of(name, ""), model_of(name, "fp8")
    sequences = prompts(seed=8, lengths=(1, 20, 33), vocab_size=192)
    expected, found = walk(plain, plain_store, sequences, seed=1), walk(ours, store, sequences, seed=1)
    # These layers, large and random, multiply errors; a wrong scale, row or part is off by the size of a logit.
    assert 0.005 < error(torch.cat(found), torch.cat(expected)) < 0.25
    saved = plain.weights_bytes - ours.weights_bytes
    assert saved == fp8_saving(ours, torch.float32) == fp8_saving(plain, torch.float32) > 0
    products = [module for module in ours.modules() if isinstance(module, Linear)]
    assert {product.weight.name for product in products} == {"fp8"}
    assert ours.head.weight.name == ours.embedding.table.name == "float32"


def test_a_tied_head_makes_no_room_of_its_own() -> None:
    reference = checkpoints.qwen3(tie_word_embeddings=True)
    config, context = reference.config.to_dict(), context_of(quantization="")
    ours = load_family("qwen3").Model(config, load_family("qwen3").spec(config), context)
    assert ours.head.weight is None


def test_where_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a GPU with 8-bit tensor cores, and this model runs on a cpu"):
        check_fp8(CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="works with 16-bit arithmetic"):
        check_fp8(torch.device("cuda"), torch.float32)
