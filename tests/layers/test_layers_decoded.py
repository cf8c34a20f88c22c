"""Packed weights that are decoded where they are used: a layer gives the bits that it gives with the decoded ones."""

import pytest
import torch

from octavo.kernels.cpu.library import Kind
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.quants import Quants, Weight
from octavo.weights.methods.base import HeldWeight
from octavo.weights.methods.cpu_native import NativeWeight
from tests.contexts import context
from tests.native import native
from tests.scalar_quants import QUANTS, as_tensor, random_quants

HIDDEN, INNER = 256, 512


def quants(type: str, num_rows: int, width: int, seed: int) -> Quants:
    return Quants(type, as_tensor(random_quants(type, num_rows * width // QUANTS[type][1], seed)).view(num_rows, -1))


def layer(act: str, weights: list[Weight], decodes: bool) -> GatedMLP:
    surroundings = context(native=native(), decodes=decodes)
    made = GatedMLP(HIDDEN, INNER, act, RMSNorm(HIDDEN, 1e-6, surroundings), surroundings)
    (norm,) = made.norm.weight_slots("norm").values()
    norm.store(torch.ones(HIDDEN))
    gate, up, down = weights
    made.gate_up.fill_weight(0, gate)
    made.gate_up.fill_weight(1, up)
    made.down.fill_weight(down)
    return made


def kinds(held: HeldWeight) -> set[Kind]:
    assert isinstance(held, NativeWeight)
    return set(held.bytes_of_kinds)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_1", "Q8_0", "Q5_0")])
def test_a_gate_is_that_of_decoded_weights_whatever_kinds_gate_and_up_have(act: str, types: tuple[str, ...]) -> None:
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    weights = [quants(type, *shape, seed) for seed, (type, shape) in enumerate(zip(types, shapes, strict=True))]
    ours = layer(act, list(weights), decodes=True)
    plain = layer(act, [weight.dequantise() for weight in weights], decodes=False)
    assert kinds(ours.down.weight) != {Kind.FLOAT32} == kinds(plain.down.weight)
    assert (kinds(ours.gate_up.weight) == {Kind.FLOAT32}) is (types[0] != types[1])
    for num_rows in (1, 9, 40):
        x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))
        assert torch.equal(ours(x.clone()), plain(x.clone()))
