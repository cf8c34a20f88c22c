"""Which method holds a weight and why, what it may import, and a method around another one."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.layers.context import BuildContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.parallel import Group
from octavo.quants import Weight
from octavo.weights.methods.base import ExpertsRequest, Gate, HeldWeight, Settings, Use, WeightRequest
from octavo.weights.methods.onednn import can_pack
from octavo.weights.methods.registry import Methods, gpu_packings, kept_on_gpu, packed_on_gpu
from tests.contexts import CPU, context
from tests.native import native

PRODUCT = WeightRequest((32, 32), 64, is_gated=True)
ODD = WeightRequest((30,), 64)
VOCABULARY = WeightRequest((48,), 64, Use.VOCABULARY)
ROUTER = WeightRequest((16,), 64, Use.ROUTER)
REQUESTS = {"product": PRODUCT, "odd": ODD, "vocabulary": VOCABULARY, "router": ROUTER}
MXFP4 = frozenset({"MXFP4"})


def picks(**settings: Any) -> dict[str, str]:
    methods = context(**settings).methods
    found = {}
    for name, request in REQUESTS.items():
        methods.picked.clear()
        methods.linear(request)
        ((found[name], _),) = methods.picked
    return found


def same(method: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(REQUESTS, method) | others


def test_torch_packs_what_it_can_on_a_cpu() -> None:
    packed = "onednn" if can_pack(CPU, torch.float32) else "torch"
    assert picks() == same(packed, router="torch")
    assert picks(device=torch.device("meta")) == same("torch")
    assert picks(quantization="fp8") == same(packed, product="torch_fp8", router="torch")


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_native_kernels_hold_everything(quantization: str) -> None:
    assert picks(native=native(), quantization=quantization) == same("cpu_native")


def test_triton_holds_what_it_multiplies() -> None:
    pytest.importorskip("triton")
    assert picks(kernels="triton") == same("triton_bf16", router="torch")
    assert picks(kernels="invariant") == same("triton_invariant")
    assert picks(kernels="triton", quantization="fp8") == same("triton_bf16", product="triton_fp8", router="torch")
    assert picks(kernels="invariant", quantization="fp8") == same("triton_invariant", product="triton_fp8")


@pytest.mark.parametrize(
    ("hidden", "settings", "name"),
    [
        (64, {"packed_types": MXFP4, "has_triton": True}, "triton_mxfp4"),
        (48, {"packed_types": MXFP4, "has_triton": True}, "triton_experts"),  # a group of 32 would be cut
        (64, {"has_triton": True}, "triton_experts"),
        (64, {"packed_types": MXFP4}, "torch_experts"),
    ],
)
def test_experts_are_kept_packed_where_a_kernel_multiplies_them(
    hidden: int, settings: dict[str, Any], name: str
) -> None:
    if settings.get("has_triton"):
        pytest.importorskip("triton")
    methods = context(**settings).methods
    methods.experts(ExpertsRequest(2, hidden, 32, Gate(), packed_type="MXFP4"))
    assert [picked for picked, _ in methods.picked] == [name]


def test_what_a_gpu_multiplies_as_it_is_stored() -> None:
    pytest.importorskip("triton")
    assert gpu_packings() > MXFP4 | {"Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "FP8"}
    # Where one type is held, all arrive packed: methods decode the others.
    for types in (MXFP4, frozenset({"Q4_0"}), frozenset({"Q4_0", "Q2_K"})):
        assert kept_on_gpu(types) == types
    # A label for people may be the same text as a type: types decide.
    for types in (frozenset({"Q2_K"}), frozenset({"MXFP4, Q8_0"}), frozenset[str]()):
        assert kept_on_gpu(types) == frozenset()


def test_packed_weights_that_are_slower_for_many_rows_are_decoded_where_there_is_room() -> None:
    pytest.importorskip("triton")
    fast, slow = gpu_packings(keeping_up=True), gpu_packings() - gpu_packings(keeping_up=True)
    assert fast >= MXFP4 | {"Q4_0", "Q5_0"} and slow >= {"Q4_K", "Q6_K", "Q8_0", "FP8"}
    assert fast.isdisjoint(slow)
    every = frozenset({*fast, *slow})
    some = {"is_tight": False, "has_experts": False, "has_8_bit_floats": True}
    assert packed_on_gpu(every, **some) == fast
    assert packed_on_gpu(every, **some | {"is_tight": True}) == every
    assert packed_on_gpu(every, **some | {"is_tight": True, "has_8_bit_floats": False}) == every - {"FP8"}
    # Methods of experts would decode them, after the memory for them was counted.
    assert packed_on_gpu(every, **some | {"is_tight": True, "has_experts": True}) == fast


def test_the_report_says_which_and_why() -> None:
    pytest.importorskip("triton")
    methods = context(kernels="triton", quantization="fp8").methods
    for request in (PRODUCT, PRODUCT, VOCABULARY, ODD, ROUTER):
        methods.linear(request)
    said = methods.in_words()
    assert said.startswith("weights held: 2 by triton_fp8, ")
    assert "1 by triton_bf16 (triton_fp8: a vocabulary stays more exact)" in said
    assert "1 by triton_bf16 (triton_fp8: the product wants multiples of 16, not 30 by 64)" in said
    assert "1 by torch (triton_fp8: a router stays more exact; triton_bf16: a router's product is torch's)" in said


def test_the_report_counts_a_method_once() -> None:
    methods = context(dtype=torch.float16).methods
    for request in (PRODUCT, PRODUCT, VOCABULARY, ROUTER):
        methods.linear(request)
    assert len({reasons for _, reasons in methods.picked}) > 1, (
        "the reasons differ, and are about methods that hold nothing"
    )
    assert methods.in_words() == "weights held: 4 by torch"


def test_every_file_names_what_it_holds_and_what_it_takes() -> None:
    for settings in ({}, {"quantization": "fp8"}, {"native": native()}):
        methods = context(**settings).methods  # type: ignore[arg-type]
        held = methods.linear(ODD)
        held.fill(0, torch.ones(30, 64))
        assert held.name == "float32" and held.nbytes >= 30 * 64 * 4
    held = context(quantization="fp8").methods.linear(PRODUCT)
    assert held.name == "fp8" and held.nbytes == 64 * 64 + 64 * 4


WITHOUT_TRITON = """
import sys, torch
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.torch_ops import TorchOps
from octavo.weights.methods.base import ExpertsRequest, Gate, Settings, WeightRequest
from octavo.weights.methods.registry import Methods, kept_on_gpu

methods = Methods(Settings(torch.device("cpu"), torch.float32, TorchOps()))
methods.linear(WeightRequest((8,), 8)), methods.table(WeightRequest((8,), 8))
methods.experts(ExpertsRequest(2, 32, 32, Gate(), packed_type="MXFP4"))
assert kept_on_gpu(frozenset()) == frozenset()
assert "triton" not in sys.modules
"""


def test_a_cpu_never_imports_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ── a method around another one ─────────────────────────────────────────────────────────────────────


class LowRank(HeldWeight):
    """W + up · down, whatever holds W."""

    def __init__(self, inner: HeldWeight, request: WeightRequest, settings: Settings) -> None:
        super().__init__(settings.ops)
        generator = torch.Generator().manual_seed(request.out_features)
        self._inner = inner
        self.down = torch.randn(2, request.in_features, generator=generator) / 8
        self.up = torch.randn(request.out_features, 2, generator=generator) / 8

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + self.down.nbytes + self.up.nbytes

    @property
    def name(self) -> str:
        return f"{self._inner.name} with an adapter"

    def fill(self, part: int, rows: Weight) -> None:
        self._inner.fill(part, rows)

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        assert activation == "none"
        return self._inner.product(x, norm, bias) + self._more(self._normed(x, norm))

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        more = self._more(x)
        return self._inner.product_add(x, bias, residual) + more

    def _more(self, x: Tensor) -> Tensor:
        return x @ self.down.t() @ self.up.t()


class AdaptedMethods(Methods):
    def linear(self, request: WeightRequest) -> HeldWeight:
        return LowRank(super().linear(request), request, self.settings)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_an_adapter_is_a_method_around_another(is_native: bool) -> None:
    """No layer changes, and no fused form goes past the adapter."""
    torch.manual_seed(1)
    plain = context(native=native() if is_native else None)
    adapted = BuildContext(Group.single(), plain.attention, AdaptedMethods(plain.methods.settings))
    norm = RMSNorm(64, 1e-6, adapted)
    norm.weight_slots("n")["n.weight"].store(torch.ones(64))
    layer = GatedMLP(64, 32, "silu", norm, adapted)
    gate, up, down = torch.randn(32, 64) / 8, torch.randn(32, 64) / 8, torch.randn(64, 32) / 8
    layer.gate_up.fill_weight(0, gate)
    layer.gate_up.fill_weight(1, up)
    layer.down.fill_weight(down)
    assert isinstance(layer.gate_up.weight, LowRank) and isinstance(layer.down.weight, LowRank)
    gate_up = torch.cat((gate, up)) + layer.gate_up.weight.up @ layer.gate_up.weight.down
    down = down + layer.down.weight.up @ layer.down.weight.down
    x = torch.randn(5, 64)
    first, second = (F.rms_norm(x, (64,), eps=1e-6) @ gate_up.t()).chunk(2, dim=1)
    torch.testing.assert_close(layer(x.clone()), x + (F.silu(first) * second) @ down.t(), atol=1e-5, rtol=1e-5)
