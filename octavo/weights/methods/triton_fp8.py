"""Weights in 8-bit floats on a GPU. Few rows: Triton kernels multiply them with inputs of 16 bits, norm, gate and residual in the
same launch. Many rows: Triton kernels round the inputs, together with the norm or the gate before torch's product."""

from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.elementwise.quantise import quantise_rows, rms_norm_fp8, silu_mul_fp8
from octavo.kernels.triton.gemm.invariant import invariant_fp8
from octavo.kernels.triton.gemm.skinny import few_rows_linear, pays_fp8
from octavo.weights.methods import torch_fp8
from octavo.weights.methods.base import LinearMethod, Method, Settings, WeightRequest, other_kernels
from octavo.weights.methods.torch_fp8 import Fp8Weight


class TritonFp8Weight(Fp8Weight):
    """With --deterministic rows are rounded and multiplied in an order that does not depend on how many there are."""

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        super().__init__(request, settings)
        self._is_fixed = settings.ops.is_invariant

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        if not self._has_few(x):
            return super().product(x, norm, bias, activation)
        return activate(self._of_few_rows(x, norm, bias, None), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if not self._has_few(x):
            return super().product_add(x, bias, residual)
        return few_rows_linear(x, self.numbers, bias=bias, residual=residual, pdl=True, scales=self.scales[0])

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        if activation not in ACTIVATIONS or not self._has_few(x):
            return None
        return self._of_few_rows(x, norm, bias, activation)

    def _has_few(self, x: Tensor) -> bool:
        n, k = self.numbers.shape
        return not self._is_fixed and pays_fp8(x.shape[0], n, k, x.device)

    def _of_few_rows(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, gated: str | None) -> Tensor:
        x, before = self._rms_normed(x, norm)
        return few_rows_linear(x, self.numbers, bias=bias, norm=before, gated=gated, pdl=True, scales=self.scales[0])

    def product_after_gate(
        self, gate_up: Tensor, activation: Activation, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        if activation not in ACTIVATIONS:
            return super().product_after_gate(gate_up, activation, bias, residual)
        rounded = silu_mul_fp8(gate_up, activation, is_fixed=self._is_fixed)
        return self._added(self._multiply(*rounded), bias, residual)

    def _rounded(self, x: Tensor, norm: NormWeights | None) -> tuple[Tensor, Tensor]:
        x, before = self._rms_normed(x, norm)
        if before is None:
            return quantise_rows(x, is_fixed=self._is_fixed)
        return rms_norm_fp8(x, *before, is_fixed=self._is_fixed)

    def _multiply(self, x: Tensor, scales: Tensor) -> Tensor:
        if self._is_fixed:
            return invariant_fp8(x, scales, self.numbers, self.scales, self._dtype)
        return super()._multiply(x, scales)


def supports(request: WeightRequest, settings: Settings) -> str | None:
    if settings.ops.kernels != "triton":
        return other_kernels(settings)
    return torch_fp8.supports(request, settings)


LINEAR: LinearMethod = Method("triton_fp8", supports, TritonFp8Weight)
