"""A sparse feed-forward network: a router sends each token to a few of many experts, whose answers are added, weighted.
Knows nothing of how the experts' products are computed: experts.py does."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts, Gate
from octavo.layers.native import NativeWeight
from octavo.layers.norm import Norm
from octavo.layers.sharding import Slot, Slots, whole


@dataclass(frozen=True, slots=True)
class Routing:
    num_experts: int
    num_chosen: int  # of them, for each token: those with the largest logits; of equal ones, those that come first
    is_normalised: bool = True  # the chosen ones' weights add up to 1; else their share in the softmax over all is kept


class Router(nn.Module):
    """One product, [T, hidden] → a logit for each expert. Whole on every rank, so that ranks agree, and never rounded: a
    token that goes to another expert is not nearly the same token."""

    def __init__(self, hidden_size: int, num_experts: int, context: BuildContext, bias: bool) -> None:
        super().__init__()
        self.shape = (num_experts, hidden_size)
        self.native: NativeWeight | None = None
        if context.native is not None:
            self.native = NativeWeight(context.native, 1, context.weight_dtype)
        self.weight = context.empty(num_experts if self.native is None else 0, hidden_size)
        self.bias = context.empty(num_experts) if bias else None
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.native is not None:
            return self.native.product(x, None, self.bias)
        if self._kernels is not None and self._kernels.IS_INVARIANT:
            logits: torch.Tensor = self._kernels.few_rows_linear(x, self.weight, bias=self.bias)
            return logits
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Slots:
        def store(tensor: torch.Tensor) -> None:
            if self.native is not None:
                self.native.fill(0, tensor)
            else:
                self.weight.copy_(tensor)

        slots = {f"{name}.weight": Slot(self.shape, store)}
        return slots if self.bias is None else slots | whole(f"{name}.bias", self.bias)


class SparseMLP(nn.Module):
    """x + Σ weight · down(gate(gate_up(norm(x)))) over the experts that are chosen for each token.

    The inner width of every expert is split over ranks. `bias`: the router and the experts have them.
    `is_fp4`: the experts' weights come as MXFP4."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        routing: Routing,
        gate: Gate,
        norm: Norm,
        context: BuildContext,
        *,
        bias: bool = False,
        is_fp4: bool = False,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.routing = routing
        self.router = Router(hidden_size, routing.num_experts, context, bias)
        self.experts = Experts(hidden_size, inner_size, routing.num_experts, gate, context, bias, is_fp4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        normed = self.norm(x)
        logits = self.router(normed)
        routing = self.routing
        return self.experts(normed, logits, routing.num_chosen, routing.is_normalised, x)  # type: ignore[no-any-return]
