"""Routers and experts against a loop over tokens in float64: natively and in torch, with ties, broken rows and odd shapes."""

import dataclasses
from typing import Any

import pytest
import torch

from octavo.layers.experts import Experts
from octavo.layers.moe import Routing, SparseMLP, by_rows
from octavo.layers.norm import RMSNorm
from octavo.quants import Quants
from octavo.quants.writers import q8_0
from octavo.weights.methods.base import Gate
from octavo.weights.methods.torch_experts import choose, grouped_product, padded_product
from tests.contexts import context
from tests.native import native

SIX, SILU = Routing(6, 3), Gate()


@dataclasses.dataclass
class Case:
    hidden: int = 48
    inner: int = 20  # no whole panel: the gate is not part of the product
    routing: Routing = SIX
    gate: Gate = SILU
    bias: bool = False


CASES = {
    "plain": Case(),
    "whole panels": Case(64, 32),
    "shares of all": Case(routing=Routing(6, 3, is_normalised=False)),
    "clamped, with biases": Case(gate=Gate(1.7, 0.5, 1.0), bias=True),
    "one of many": Case(routing=Routing(40, 1)),
    "all": Case(routing=Routing(4, 4)),
}


def random_weights(case: Case, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count, hidden, inner = case.routing.num_experts, case.hidden, case.inner
    shapes = {
        "norm": (hidden,), "router": (count, hidden), "router_bias": (count,), "gate": (count, inner, hidden),
        "up": (count, inner, hidden), "down": (count, hidden, inner), "gate_bias": (count, inner),
        "up_bias": (count, inner), "down_bias": (count, hidden),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def build(
    case: Case, weights: dict[str, torch.Tensor], is_native: bool, num_threads: int = 2, **more: Any
) -> SparseMLP:
    kernels = native(num_threads) if is_native else None
    surroundings = context(native=kernels, **more)
    norm = RMSNorm(case.hidden, 1e-5, surroundings)
    layer = SparseMLP(case.hidden, case.inner, case.routing, case.gate, norm, surroundings, bias=case.bias)
    norm.weight_slots("norm")["norm.weight"].store(weights["norm"])
    slots = layer.router.weight_slots("router")
    slots["router.weight"].store(weights["router"])
    for expert in range(case.routing.num_experts):
        for name, slot in layer.experts.weight_slots(expert, "gate", "up", "down").items():
            slot.store(weights[name.removesuffix(".weight")][expert])
    if case.bias:
        slots["router.bias"].store(weights["router_bias"])
        layer.experts.fill_biases(weights["gate_bias"], weights["up_bias"])
        layer.experts.fill_down_bias(weights["down_bias"])
    return layer


def expected_of(case: Case, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    if not case.bias:
        w |= {name: torch.zeros_like(tensor) for name, tensor in w.items() if name.endswith("_bias")}
    out = x.double()
    for token, row in enumerate(x.double()):
        normed = row / (row.square().mean() + 1e-5).sqrt() * w["norm"]
        logits = (w["router"] @ normed + w["router_bias"]).tolist()
        best = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[: case.routing.num_chosen]
        powers = torch.tensor(logits, dtype=torch.double).exp()
        shares = powers[best] / (powers[best] if case.routing.is_normalised else powers).sum()
        for expert, share in zip(best, shares, strict=True):
            gate = w["gate"][expert] @ normed + w["gate_bias"][expert]
            up = w["up"][expert] @ normed + w["up_bias"][expert]
            if case.gate.limit:
                gate, up = gate.clamp(max=case.gate.limit), up.clamp(-case.gate.limit, case.gate.limit)
            inner = gate * torch.sigmoid(case.gate.alpha * gate) * (up + case.gate.offset)
            out[token] += share * (w["down"][expert] @ inner + w["down_bias"][expert])
    return out.float()


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_loop_over_tokens(case: Case, is_native: bool) -> None:
    weights = random_weights(case)
    layer = build(case, weights, is_native)
    for num_tokens in (1, 7, 90):
        x = torch.randn(num_tokens, case.hidden, generator=torch.Generator().manual_seed(num_tokens))
        torch.testing.assert_close(layer(x.clone()), expected_of(case, weights, x), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_of_equal_logits_the_first_experts_are_chosen(is_native: bool) -> None:
    case = Case(routing=Routing(8, 3))
    weights = random_weights(case)
    weights["router"][[1, 2, 5, 6, 7]] = weights["router"][1].clone()  # five experts tie, in every row
    x = torch.randn(9, case.hidden, generator=torch.Generator().manual_seed(4))
    found = build(case, weights, is_native)(x.clone())
    torch.testing.assert_close(found, expected_of(case, weights, x), atol=2e-5, rtol=2e-5)


HELD = {"float32": {}, "bfloat16": {"weight_dtype": torch.bfloat16}, "int8": {"quantization": "int8"}}


@pytest.mark.parametrize("more", HELD.values(), ids=HELD)
def test_a_row_has_the_same_bits_in_any_company(more: dict[str, Any]) -> None:
    """Alone, among others, with other numbers of threads; experts tie."""
    case = Case(64, 32, Routing(12, 4), Gate(1.7, 0.5, 1.0), bias=True)
    weights = random_weights(case)
    weights["router"][3:9] = weights["router"][3].clone()
    weights["router_bias"][3:9] = 0.1
    x = torch.randn(120, 64, generator=torch.Generator().manual_seed(2))
    alone = build(case, weights, True, 1, **more)
    expected = torch.cat([alone(row[None].clone()) for row in x])
    for num_threads in (1, 2, 3):
        layer = build(case, weights, True, num_threads, **more)
        for part in (slice(0, 120), slice(5, 38), slice(100, 102)):
            assert torch.equal(layer(x[part].clone()), expected[part])


@pytest.mark.parametrize("function", [torch.sigmoid, torch.log])
def test_functions_of_rows_have_the_same_bits_in_any_company(function: Any) -> None:
    """torch's own results differ in some of these: what is left over behind its vectors is computed in another way."""
    r = torch.Generator().manual_seed(3)
    for width in (3, 8, 40, 64):
        x = torch.rand(33, width, generator=r) * 3 + 0.01
        whole = by_rows(function, x)
        torch.testing.assert_close(whole, function(x))
        for at in range(len(x)):
            assert torch.equal(by_rows(function, x[at : at + 1]), whole[at : at + 1]), (width, at)


def test_rounded_weights_are_near() -> None:
    case = Case(64, 32)
    weights = random_weights(case)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    found, exact = build(case, weights, True, quantization="int8")(x.clone()), expected_of(case, weights, x)
    assert 0 < (found - exact).abs().mean() < 0.02 * (exact - x).abs().mean()


@pytest.mark.parametrize("part", ["gate", "down"])
def test_one_expert_that_cannot_be_held_packed_has_all_decoded(part: str) -> None:
    """As of a checkpoint that stores experts one by one: a scale of one may be out of float16's range."""
    case = Case(64, 32)
    weights = random_weights(case)
    held: dict[str, list[Any]] = {}
    for name in ("gate", "up", "down"):
        scales = torch.full((*weights[name].shape[1:2], weights[name].shape[2] // 32), 0.01, dtype=torch.float16)
        packed = [q8_0(scales, (rows / 0.01).round().clamp(-127, 127).to(torch.int8)) for rows in weights[name]]
        weights[name] = torch.stack([quants.dequantise() for quants in packed])
        held[name] = [weights[name][0] if name == part else packed[0], *packed[1:]]
    layer = build(case, weights | held, True)  # type: ignore[arg-type]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    found, exact = layer(x.clone()), expected_of(case, weights, x)
    assert (found - exact).abs().mean() < 0.02 * (exact - x).abs().mean()


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_stays_alone(value: float, is_native: bool) -> None:
    case = CASES["clamped, with biases"]
    weights = random_weights(case)
    layer = build(case, weights, is_native)
    x = torch.randn(8, case.hidden, generator=torch.Generator().manual_seed(2))
    expected = layer(x.clone())
    broken = x.clone()
    broken[3, 5] = value
    found = layer(broken)
    assert not found[3].isfinite().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(found[others], expected[others], atol=1e-5, rtol=1e-5)


def test_no_tokens() -> None:
    for is_native in (True, False):
        layer = build(Case(), random_weights(Case()), is_native)
        assert layer(torch.empty(0, 48)).shape == (0, 48)


@pytest.mark.parametrize("width", [16, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_grouped_products_equal_one_by_one(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    counts = torch.tensor([3, 0, 1, 0, 5])
    rows = torch.randn(9, width, generator=generator).to(dtype)
    weights = torch.randn(5, 24, width, generator=generator).to(dtype)
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    expected = torch.cat([part.float() @ weight.float().t() for part, weight in parts])
    for product in (grouped_product, padded_product):
        found = product(rows, weights, counts)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_choosing_breaks_ties_by_number_and_keeps_the_shares() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    chosen, weights = choose(logits, 2, is_normalised=True)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))
    _, weights = choose(logits, 2, is_normalised=False)
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 1:3])


def test_experts_of_four_bits_are_held_as_they_come_where_a_kernel_multiplies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's way, in Triton's interpreter: against the same numbers decoded."""
    pytest.importorskip("triton")
    from tests.interpreter import mend

    mend(monkeypatch)
    generator = torch.Generator().manual_seed(12)
    decoded, packed = (
        Experts(64, 32, 3, SILU, context(packed_types=frozenset({"MXFP4"}), has_triton=has_triton), False, "MXFP4")
        for has_triton in (False, True)
    )
    assert (decoded.weights.name, packed.weights.name) == ("float32", "mxfp4")

    def random_quants(num_rows: int, width: int) -> Quants:
        quants = torch.randint(0, 256, (num_rows, width // 32, 17), dtype=torch.uint8, generator=generator)
        quants[:, :, 0] = 124
        return Quants("MXFP4", quants.flatten(1))

    for expert in range(3):
        for part in range(2):
            weight = random_quants(32, 64)
            decoded.fill_gate_up(expert, part, weight)
            packed.fill_gate_up(expert, part, weight)
        weight = random_quants(64, 32)
        decoded.fill_down(expert, weight)
        packed.fill_down(expert, weight)
    assert packed.weights.nbytes * 32 == decoded.weights.nbytes / 4 * 17  # 17 bytes hold 32 weights
    x, logits = torch.randn(9, 64, generator=generator), torch.randn(9, 3, generator=generator)
    found, expected = (made(x, logits, 2, True, torch.zeros(9, 64)) for made in (packed, decoded))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
