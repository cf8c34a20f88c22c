"""Weights as plain tensors in the type of the arithmetic, multiplied by torch. On any device."""

import torch.nn.functional as F
from torch import Tensor, bmm

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.quants import Weight
from octavo.weights.methods.base import (
    HeadsMethod,
    HeadsRequest,
    HeldHeads,
    HeldTable,
    HeldWeight,
    LinearMethod,
    Method,
    Settings,
    TableMethod,
    WeightRequest,
    decoded,
    dtype_name,
    supports_all,
)


class PlainWeight(HeldWeight, HeldTable):
    """A tied head multiplies with the very tensor in which ids are looked up."""

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        super().__init__(settings.ops)
        self.request = request
        self.tensor = settings.empty(request.out_features, request.in_features)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def name(self) -> str:
        return dtype_name(self.tensor.dtype)

    @property
    def plain(self) -> Tensor:
        return self.tensor

    def fill(self, part: int, rows: Weight) -> None:
        target, mine = self.tensor[self.request.rows(part)], decoded(rows)
        target[: len(mine)].copy_(mine)
        target[len(mine) :].zero_()

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        return activate(F.linear(self._normed(x, norm), self.tensor, bias), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = F.linear(x, self.tensor, bias)
        return y if residual is None else y.add_(residual)

    def look_up(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        rows = F.embedding(ids, self.tensor)
        return rows if factor == 1.0 else rows.mul_(factor)

    def as_head(self) -> HeldWeight:
        return self


class PlainHeads(HeldHeads):
    def __init__(self, request: HeadsRequest, settings: Settings) -> None:
        self.tensor = settings.empty(request.num_heads, request.num_outputs, request.num_inputs)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def name(self) -> str:
        return dtype_name(self.tensor.dtype)

    def fill(self, head: int, rows: Tensor) -> None:
        self.tensor[head] = rows

    def product(self, x: Tensor) -> Tensor:
        return bmm(x.transpose(0, 1), self.tensor.transpose(1, 2)).transpose(0, 1)


LINEAR: LinearMethod = Method("torch", supports_all, PlainWeight)
TABLE: TableMethod = Method("torch", supports_all, PlainWeight)
HEADS: HeadsMethod = Method("torch", supports_all, PlainHeads)
