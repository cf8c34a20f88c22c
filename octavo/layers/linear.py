"""Matrix products with weights, whole or split over ranks by output (ColumnLinear) or by input (RowLinear)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from octavo.kernels.device_ops import Activation
from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm
from octavo.layers.sharding import WeightSlot, WeightSlots, fill_share, share_columns, share_rows, share_size
from octavo.quants import Quants, Weight
from octavo.weights.methods.base import WeightRequest


class Linear(nn.Module):
    """One rank's weight, as a method holds it, and its bias."""

    def __init__(self, request: WeightRequest, bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.group = context.group
        self.request = request
        self.weight = context.methods.linear(request)
        self.bias = context.empty(request.out_features) if bias else None


class ColumnLinear(Linear):
    """Each rank computes its share of the outputs of each part. Parts are checkpoint tensors fused into one product.

    Where a part does not split evenly, the last ranks' outputs end in zeros; a model that cannot use those checks first.
    `is_gated`: the two parts are gate and up."""

    def __init__(
        self,
        in_features: int,
        part_sizes: Sequence[int],
        context: BuildContext,
        bias: bool = False,
        *,
        is_gated: bool = False,
    ) -> None:
        shares = tuple(share_size(size, context.group) for size in part_sizes)
        super().__init__(WeightRequest(shares, in_features, is_gated=is_gated), bias, context)
        self.part_sizes = tuple(part_sizes)

    def forward(self, x: torch.Tensor, norm: Norm | None = None, activation: Activation = "none") -> torch.Tensor:
        """[T, in] → [T, out / ranks] of norm(x)."""
        return self.weight.product(x, None if norm is None else norm.values, self.bias, activation)

    def gated(self, x: torch.Tensor, norm: Norm | None, activation: Activation) -> torch.Tensor | None:
        """activation(gate) · up of norm(x), [T, out / ranks / 2], where that is part of the product; None: it is not."""
        return self.weight.gated(x, None if norm is None else norm.values, self.bias, activation)

    def warm_up_gate(self, activation: Activation, max_rows: int) -> None:
        self.weight.warm_up_gate(activation, self.bias is not None, max_rows)

    def fill_weight(self, part: int, tensor: Weight) -> None:
        """`tensor` is the whole part, [out of the part, in]."""
        self.weight.fill(part, share_rows(tensor, self.group))

    def fill_bias(self, part: int, tensor: torch.Tensor) -> None:
        assert self.bias is not None
        fill_share(self.bias[self.request.rows(part)], tensor, self.group)

    def fused_slots(self, name: str, arranged: Callable[[int, Any], Any] = lambda part, rows: rows) -> WeightSlots:
        """One name for all parts, whose rows stand one after the other in the checkpoint's tensor. `arranged` is given the
        number of a part and its rows (or its bias) before they are stored."""

        def split(store: Callable[[int, Any], None]) -> Callable[[Any], None]:
            def stored(tensor: Weight) -> None:
                first = 0
                for part, size in enumerate(self.part_sizes):
                    if isinstance(tensor, Quants):
                        store(part, arranged(part, tensor.narrow_rows(first, size)))
                    else:
                        store(part, arranged(part, tensor[first : first + size]))
                    first += size

            return stored

        slots = {
            f"{name}.weight": WeightSlot((sum(self.part_sizes), self.request.in_features), split(self.fill_weight))
        }
        if self.bias is not None:
            slots[f"{name}.bias"] = WeightSlot((sum(self.part_sizes),), split(self.fill_bias))
        return slots

    def weight_slots(self, *names: str) -> WeightSlots:
        """One name for each part."""
        assert len(names) == len(self.part_sizes)
        slots: WeightSlots = {}
        for part, (name, size) in enumerate(zip(names, self.part_sizes, strict=True)):
            shape = (size, self.request.in_features)
            slots[f"{name}.weight"] = WeightSlot(shape, lambda t, part=part: self.fill_weight(part, t))  # type: ignore[misc]
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot((size,), lambda t, part=part: self.fill_bias(part, t))  # type: ignore[misc]
        return slots


class RowLinear(Linear):
    """Each rank multiplies its share of the inputs; the ranks' results are added up, residual and bias counted once."""

    def __init__(self, in_features: int, out_features: int, context: BuildContext, bias: bool = False) -> None:
        # Rank 0 adds bias and residual before the sum over ranks, so that they cost no operation of their own.
        self.is_first = context.group.rank == 0
        request = WeightRequest((out_features,), in_features // context.group.size, adds_residual=self.is_first)
        super().__init__(request, bias and self.is_first, context)
        self.full_shape = (out_features, in_features)
        self.has_bias = bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """[T, in / ranks] → residual + the product, [T, out], the same on every rank. The residual may be changed."""
        return self._summed(self.weight.product_add(x, self.bias, residual if self.is_first else None))

    def after_gate(self, gate_up: torch.Tensor, activation: Activation, residual: torch.Tensor | None) -> torch.Tensor:
        """forward(activation(gate) · up, residual) of gate_up [T, 2 in / ranks], which may be changed."""
        residual = residual if self.is_first else None
        return self._summed(self.weight.product_after_gate(gate_up, activation, self.bias, residual))

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def fill_weight(self, tensor: Weight) -> None:
        self.weight.fill(0, share_columns(tensor, self.group))

    def fill_bias(self, tensor: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias.copy_(tensor)

    def weight_slots(self, name: str) -> WeightSlots:
        slots = {f"{name}.weight": WeightSlot(self.full_shape, self.fill_weight)}
        if self.has_bias:
            slots[f"{name}.bias"] = WeightSlot(self.full_shape[:1], self.fill_bias)
        return slots
