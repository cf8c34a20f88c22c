"""Matrix products with weights, whole or split over ranks by output (ColumnLinear) or by input (RowLinear).
Knows nothing of what the numbers mean."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.packing import can_pack, pack, packed_linear, packed_linear_add
from octavo.layers.sharding import Slot, Slots, fill_share, share, share_size


class Linear(nn.Module):
    """One rank's weight [out, in], filled part by part; on a CPU it is packed for oneDNN once the last part is in."""

    def __init__(self, in_features: int, out_features: int, bias: bool, num_parts: int, context: BuildContext) -> None:
        super().__init__()
        self.group = context.group
        self.weight = context.empty(out_features, in_features)
        self.bias = context.empty(out_features) if bias else None
        self.is_packed = False
        self._kernels = context.kernels
        self._parts_to_fill = num_parts

    def adopt(self, weight: torch.Tensor) -> None:
        """Take this rank's weight whole, without a copy of it where it is not packed."""
        self.weight = weight
        self._pack()

    def _filled_part(self) -> None:
        self._parts_to_fill -= 1
        # Packed as soon as possible: the plain copy is freed before the next layer's weights arrive.
        if self._parts_to_fill == 0:
            self._pack()

    def _pack(self) -> None:
        if can_pack(self.weight):
            self.weight = pack(self.weight)
            self.is_packed = True


class ColumnLinear(Linear):
    """Each rank computes its share of the outputs of each part. Parts are checkpoint tensors fused into one product.

    Where a part does not split evenly, the last ranks' outputs end in zeros; a model that cannot use those checks first."""

    def __init__(self, in_features: int, part_sizes: Sequence[int], context: BuildContext, bias: bool = False) -> None:
        shares = [share_size(size, context.group) for size in part_sizes]
        super().__init__(in_features, sum(shares), bias, len(shares), context)
        self.in_features = in_features
        self.part_sizes = tuple(part_sizes)
        self._rows = [slice(sum(shares[:part]), sum(shares[: part + 1])) for part in range(len(shares))]

    def forward(self, x: torch.Tensor, norm: Norm | None = None, activation: str = "none") -> torch.Tensor:
        """[T, in] → [T, out / ranks] of norm(x). `activation`: none or gelu_tanh."""
        if activation == "none" and self.has_few(x):
            return self.few(x, norm)
        if norm is not None:
            x = norm(x)
        if self.is_packed:
            return packed_linear(x, self.weight, self.bias, activation)
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y, approximate="tanh") if activation == "gelu_tanh" else y

    def has_few(self, x: torch.Tensor) -> bool:
        """Whether x has so few rows that few() is the faster product."""
        return self._kernels is not None and self._kernels.pays(x.shape[0], *self.weight.shape)

    def few(self, x: torch.Tensor, norm: Norm | None, gated: str = "") -> torch.Tensor:
        """The same for few rows, with an RMSNorm before it and the gate after it in the same launch."""
        assert self._kernels is not None
        if norm is not None and not isinstance(norm, RMSNorm):
            x, norm = norm(x), None
        before = None if norm is None else (norm.weight, norm.epsilon)
        y: torch.Tensor = self._kernels.few_rows_linear(
            x, self.weight, bias=self.bias, norm=before, gated=gated or None, pdl=True
        )
        return y

    def fill_weight(self, part: int, tensor: torch.Tensor) -> None:
        """`tensor` is the whole part, [out of the part, in]."""
        fill_share(self.weight[self._rows[part]], tensor, self.group)
        self._filled_part()

    def fill_bias(self, part: int, tensor: torch.Tensor) -> None:
        assert self.bias is not None
        fill_share(self.bias[self._rows[part]], tensor, self.group)

    def slots(self, *names: str) -> Slots:
        """One name for each part."""
        assert len(names) == len(self.part_sizes)
        slots: Slots = {}
        for part, (name, size) in enumerate(zip(names, self.part_sizes, strict=True)):
            slots[f"{name}.weight"] = Slot((size, self.in_features), lambda t, part=part: self.fill_weight(part, t))  # type: ignore[misc]
            if self.bias is not None:
                slots[f"{name}.bias"] = Slot((size,), lambda t, part=part: self.fill_bias(part, t))  # type: ignore[misc]
        return slots


class RowLinear(Linear):
    """Each rank multiplies its share of the inputs; the ranks' results are added up, residual and bias counted once."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, bias: bool = False) -> None:
        # Rank 0 adds bias and residual before the sum over ranks, so that they cost no operation of their own.
        self.is_first = context.group.rank == 0
        super().__init__(in_features // context.group.size, out_features, bias and self.is_first, 1, context)
        self.whole_shape = (out_features, in_features)
        self.has_bias = bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[T, in / ranks] → residual + the product, [T, out], the same on every rank. The residual may be changed."""
        y = self._share(x, residual)
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def _share(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not self.is_first:
            return packed_linear(x, self.weight, None) if self.is_packed else F.linear(x, self.weight)
        if self.is_packed:
            return packed_linear_add(x, self.weight, self.bias, residual)
        if self._kernels is None:
            return F.linear(x, self.weight, self.bias).add_(residual)
        if self._kernels.pays(x.shape[0], *self.weight.shape):
            y: torch.Tensor = self._kernels.few_rows_linear(
                x, self.weight, bias=self.bias, residual=residual, pdl=True
            )
            return y
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight.t())  # in place: the sum costs no pass of its own

    def fill_weight(self, tensor: torch.Tensor) -> None:
        self.weight.copy_(share(tensor, 1, self.group))
        self._filled_part()

    def fill_bias(self, tensor: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias.copy_(tensor)

    def slots(self, name: str) -> Slots:
        slots = {f"{name}.weight": Slot(self.whole_shape, self.fill_weight)}
        if self.has_bias:
            slots[f"{name}.bias"] = Slot(self.whole_shape[:1], self.fill_bias)
        return slots
