"""A sparse feed-forward network: a router sends each token to a few of many experts, whose answers are added, weighted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts
from octavo.layers.norm import Norm
from octavo.layers.sharding import WeightSlot, WeightSlots, unsharded
from octavo.weights.methods.base import Gate, RouterWeights, Use, WeightRequest


@dataclass(frozen=True, slots=True)
class Routing:
    num_experts: int
    num_chosen: int  # of them, for each token: those with the largest logits; of equal ones, those that come first
    is_normalised: bool = True  # the chosen ones' weights add up to 1; else their share in the softmax over all is kept


_TOGETHER = 64  # no fewer numbers than torch's vector loops take at a time on any CPU


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) of each number of x [T, N], with the same bits for a row in any company. On a CPU torch computes what is left over at the
    end of a tensor by another function than the rest, with other bits: rows are padded so that nothing is left over."""
    width = x.shape[1]
    return function(F.pad(x, (0, -width % _TOGETHER), value=1.0))[:, :width]


class Router(nn.Module):
    """One product, [T, hidden] → a logit for each expert. Whole on every rank, so that ranks agree, and never
    rounded: a small error in a logit can select another expert, which changes the result completely."""

    def __init__(self, hidden_size: int, num_experts: int, context: BuildContext, bias: bool) -> None:
        super().__init__()
        self.shape = (num_experts, hidden_size)
        self.weight = context.methods.linear(WeightRequest((num_experts,), hidden_size, Use.ROUTER))
        self.bias = context.empty(num_experts) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.product(x, None, self.bias)

    @property
    def plain(self) -> RouterWeights | None:
        """Its numbers, for kernels that route by themselves; None: they are not plain, or an adapter changes them."""
        weight = self.weight.plain
        return None if weight is None else RouterWeights(weight, self.bias)

    def weight_slots(self, name: str) -> WeightSlots:
        slots = {f"{name}.weight": WeightSlot(self.shape, lambda tensor: self.weight.fill(0, tensor))}
        return slots if self.bias is None else slots | unsharded(f"{name}.bias", self.bias)


class SparseMLP(nn.Module):
    """x + Σ weight · down(gate(gate_up(norm(x)))) over the experts that are chosen for each token.

    The inner width of every expert is split over ranks. `bias`: the router and the experts have them.
    `packed_type`: as which all experts' weights arrive, where weights arrive packed."""

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
        packed_type: str = "",
    ) -> None:
        super().__init__()
        self.norm = norm
        self.routing = routing
        self.router = Router(hidden_size, routing.num_experts, context, bias)
        self.experts = Experts(hidden_size, inner_size, routing.num_experts, gate, context, bias, packed_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        routing = self.routing
        few = self.experts.sum_of_few(x, self.norm, self.router.plain, routing.num_chosen, routing.is_normalised)
        if few is not None:
            return few
        normed = self.norm(x)
        logits = self.router(normed)
        return self.experts(normed, logits, routing.num_chosen, routing.is_normalised, x)  # type: ignore[no-any-return]

    def warm_up(self, max_rows: int) -> None:
        """Inside a warm-up: compile the kernels that are used only for certain numbers of rows."""
        routing = self.routing
        self.experts.weights.warm_up(routing.num_experts, routing.num_chosen, routing.is_normalised, max_rows)


def warm_up_experts(model: nn.Module, max_rows: int) -> None:
    """Inside a warm-up: compile the experts' kernels for steps of up to `max_rows` tokens."""
    # Layers of one shape take the same kernels.
    mlps = (module for module in model.modules() if isinstance(module, SparseMLP))
    for mlp in {(mlp.routing, mlp.experts.hidden_size, mlp.experts.inner_size): mlp for mlp in mlps}.values():
        mlp.warm_up(max_rows)
