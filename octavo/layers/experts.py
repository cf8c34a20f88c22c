"""Many small gated networks of one shape, each given the tokens that were chosen for it: products grouped by expert.
Ranks share every expert's inner width or, with expert parallelism, have different experts."""

import torch
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm
from octavo.layers.sharding import WeightSlot, WeightSlots, share, share_columns, share_rows, share_size
from octavo.parallel import Group
from octavo.quants import Quants, Weight
from octavo.weights.methods.base import ExpertsRequest, Gate, RouterWeights


def narrow(weight: Weight, first: int, count: int) -> Weight:
    """Rows first … first + count − 1 of a weight, as a view."""
    return weight.narrow_rows(first, count) if isinstance(weight, Quants) else weight[first : first + count]


class Experts(nn.Module):
    """gate_up and down of every expert. `packed_type`: as which all of them arrive, where weights arrive packed."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        gate: Gate,
        context: BuildContext,
        bias: bool,
        packed_type: str = "",
    ) -> None:
        super().__init__()
        group = self.group = context.group
        self.num_experts, self.hidden_size, self.full_inner = num_experts, hidden_size, inner_size
        # The ranks that share one expert, and the experts that this rank has.
        self._sharing = Group.single() if context.splits_experts else group
        assert not context.splits_experts or num_experts % group.size == 0, "refused when the model was opened"
        num_held = num_experts // group.size if context.splits_experts else num_experts
        self.held = (
            range(num_held * group.rank, num_held * (group.rank + 1)) if context.splits_experts else range(num_held)
        )
        self.inner_size = share_size(inner_size, self._sharing)
        self._is_first = group.rank == 0  # adds the residual, which ranks must count once
        self.has_bias = bias
        self.alternates = False  # a checkpoint's fused gate_up has rows of gate and up in turn, not one after the other
        self.gate_up_bias = context.empty(num_held, 2 * self.inner_size) if bias else None
        # Of the ranks that share an expert, one adds the bias of down.
        self.down_bias = context.empty(num_held, hidden_size) if bias and self._sharing.rank == 0 else None
        self.weights = context.methods.experts(
            ExpertsRequest(
                num_held,
                hidden_size,
                self.inner_size,
                gate,
                self.gate_up_bias,
                self.down_bias,
                packed_type,
                num_experts,
                self.held.start,
            )
        )

    def forward(
        self, x: torch.Tensor, logits: torch.Tensor, num_chosen: int, is_normalised: bool, residual: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden], logits [T, experts] → residual + the weighted sum, [T, hidden]. The residual may be changed."""
        mine = residual if self._is_first else None
        y = self.weights.weighted_sum(x, logits, num_chosen, is_normalised, mine)
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def sum_of_few(
        self, x: torch.Tensor, norm: Norm, router: RouterWeights | None, num_chosen: int, is_normalised: bool
    ) -> torch.Tensor | None:
        """x + the weighted sum of norm(x), routed by the router's numbers; None, and x as it was: compute one after the other."""
        if self.group.size > 1 or router is None or norm.values.bias is not None:
            return None
        return self.weights.sum_of_few(x, norm.values, router, num_chosen, is_normalised)

    def inner_numbers(self) -> torch.Tensor:
        """Which of an expert's inner numbers this rank computes."""
        return share(torch.arange(self.full_inner), 0, self._sharing)

    # ── filling ─────────────────────────────────────────────────────────────────────────────────────

    def fill_gate_up(self, expert: int, part: int, tensor: Weight) -> None:
        """Part 0: the whole gate [inner, hidden]; 1: up."""
        if expert in self.held:
            self.weights.fill_gate_up(expert - self.held.start, part, share_rows(tensor, self._sharing))

    def fill_down(self, expert: int, tensor: Weight) -> None:
        """The whole down [hidden, inner]."""
        if expert in self.held:
            self.weights.fill_down(expert - self.held.start, share_columns(tensor, self._sharing))

    def fill_biases(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        """[experts, inner] each, whole."""
        assert self.gate_up_bias is not None
        held = slice(self.held.start, self.held.stop)
        self.gate_up_bias[:, : self.inner_size] = share(gate[held], 1, self._sharing)
        self.gate_up_bias[:, self.inner_size :] = share(up[held], 1, self._sharing)

    def fill_down_bias(self, tensor: torch.Tensor) -> None:
        if self.down_bias is not None:
            self.down_bias.copy_(tensor[self.held.start : self.held.stop])

    def alike(self, stack: Weight) -> Weight:
        """All experts' rows, as they are to be given to fill_gate_up and fill_down."""
        return self.weights.alike(stack)

    def _fill_stack(self, stack: Weight, part: int) -> None:
        """Part 0: gates [experts · inner, hidden]; 1: ups; 2: downs [experts · hidden, inner]."""
        stack = self.alike(stack)
        num_rows = self.hidden_size if part == 2 else self.full_inner
        for expert in self.held:
            rows = narrow(stack, expert * num_rows, num_rows)
            if part == 2:
                self.fill_down(expert, rows)
            else:
                self.fill_gate_up(expert, part, rows)

    def stack_slots(self, gate: str, up: str, down: str) -> WeightSlots:
        """For checkpoints that store all experts' rows as one matrix, one expert's after the other's."""
        rows, columns = (
            (self.num_experts * self.full_inner, self.hidden_size),
            (self.num_experts * self.hidden_size, self.full_inner),
        )
        return {
            f"{gate}.weight": WeightSlot(rows, lambda stack: self._fill_stack(stack, 0)),
            f"{up}.weight": WeightSlot(rows, lambda stack: self._fill_stack(stack, 1)),
            f"{down}.weight": WeightSlot(columns, lambda stack: self._fill_stack(stack, 2)),
        }

    def weight_slots(self, expert: int, gate: str, up: str, down: str) -> WeightSlots:
        """Weight slots of one expert's tensors, for families that store each expert by itself."""
        rows, columns = (self.full_inner, self.hidden_size), (self.hidden_size, self.full_inner)
        is_elsewhere = expert not in self.held
        return {
            f"{gate}.weight": WeightSlot(
                rows, lambda tensor: self.fill_gate_up(expert, 0, tensor), is_elsewhere=is_elsewhere
            ),
            f"{up}.weight": WeightSlot(
                rows, lambda tensor: self.fill_gate_up(expert, 1, tensor), is_elsewhere=is_elsewhere
            ),
            f"{down}.weight": WeightSlot(
                columns, lambda tensor: self.fill_down(expert, tensor), is_elsewhere=is_elsewhere
            ),
        }
