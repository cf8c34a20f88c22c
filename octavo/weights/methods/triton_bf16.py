"""Weights in 16 bits on a GPU: Triton kernels where there are few rows or a gate comes after, else torch's product."""

import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.gemm.gated import gated_linear, gated_pays, gated_row_counts
from octavo.kernels.triton.gemm.skinny import few_rows_linear, pays
from octavo.weights.methods.base import LinearMethod, Method, Settings, TableMethod, Use, WeightRequest, other_kernels
from octavo.weights.methods.torch import PlainWeight


class TritonWeight(PlainWeight):
    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        if pays(x.shape[0], *self.tensor.shape):
            y = self._of_few_rows(x, norm, bias, None)
        else:
            y = F.linear(self._normed(x, norm), self.tensor, bias)
        return activate(y, activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if self.request.adds_residual and pays(x.shape[0], *self.tensor.shape):
            return few_rows_linear(x, self.tensor, bias=bias, residual=residual, pdl=True)
        if residual is None:
            return F.linear(x, self.tensor, bias)
        if bias is not None:
            residual.add_(bias)
        return residual.addmm_(x, self.tensor.t())  # in place: the sum costs no pass of its own

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        if activation not in ACTIVATIONS:
            return None
        if bias is None and gated_pays(x.shape[0], self.tensor, activation):
            return gated_linear(self._normed(x, norm), self.tensor, activation, pdl=True)
        n, k = self.tensor.shape
        if pays(x.shape[0], n, k, is_gated=True):
            return self._of_few_rows(x, norm, bias, activation)
        return None

    def _of_few_rows(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, gated: str | None) -> Tensor:
        """With an RMSNorm before the product, and a gate after it, in the same launch."""
        x, before = self._rms_normed(x, norm)
        return few_rows_linear(x, self.tensor, bias=bias, norm=before, gated=gated, pdl=True)

    def warm_up_gate(self, activation: Activation, has_bias: bool, max_rows: int) -> None:
        if has_bias or activation not in ACTIVATIONS:
            return
        for num_rows in gated_row_counts(self.tensor, activation, max_rows):
            self.gated(self.tensor.new_empty(num_rows, self.tensor.shape[1]), None, None, activation)


def supports_table(request: WeightRequest, settings: Settings) -> str | None:
    return None if settings.ops.kernels == "triton" else other_kernels(settings)


def supports(request: WeightRequest, settings: Settings) -> str | None:
    if request.use is Use.ROUTER:
        return "a router's product is torch's"
    return supports_table(request, settings)


LINEAR: LinearMethod = Method("triton_bf16", supports, TritonWeight)
TABLE: TableMethod = Method("triton_bf16", supports_table, TritonWeight)
