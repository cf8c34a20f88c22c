"""Weights in 16 bits on a GPU with --deterministic: one Triton product for any number of rows, in which a row's bits do not
depend on the other rows."""

from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.gemm.invariant import invariant_linear
from octavo.weights.methods.base import LinearMethod, Method, Settings, TableMethod, WeightRequest
from octavo.weights.methods.torch import PlainWeight


class InvariantWeight(PlainWeight):
    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        return activate(self._product(x, norm, bias, None), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return invariant_linear(x, self.tensor, bias=bias, residual=residual, pdl=True)

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        return self._product(x, norm, bias, activation) if activation in ACTIVATIONS else None

    def _product(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, gated: str | None) -> Tensor:
        x, before = self._rms_normed(x, norm)
        return invariant_linear(x, self.tensor, bias=bias, norm=before, gated=gated, pdl=True)


def supports(request: WeightRequest, settings: Settings) -> str | None:
    return None if settings.ops.is_invariant else "--deterministic is not asked for"


LINEAR: LinearMethod = Method("triton_invariant", supports, InvariantWeight)
TABLE: TableMethod = Method("triton_invariant", supports, InvariantWeight)
