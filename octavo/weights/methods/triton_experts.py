"""Experts as two plain tensors on a GPU, multiplied by Triton kernels: nothing waits for the counts of rows."""

import torch
from torch import Tensor

from octavo.kernels.device_ops import NormWeights
from octavo.kernels.triton.moe.expert_plan import Tiles, fitting
from octavo.kernels.triton.moe.experts import ExpertTensors, experts, plan_experts
from octavo.kernels.triton.moe.grouped import (
    MixedChoice,
    Routing,
    can_run,
    choose_few_plain,
    choose_plain,
    mixed_experts,
    plain_experts,
    plain_experts_of_few,
    row_counts,
)
from octavo.weights.methods.base import (
    ExpertsMethod,
    ExpertsRequest,
    Method,
    RouterWeights,
    Settings,
    supports_all,
)
from octavo.weights.methods.torch_experts import PlainExperts

# With --deterministic one cut serves every number of rows: another would take another matrix instruction.
_INVARIANT_TILES = Tiles(64, 64, 64, 4, 3)


class TritonExperts(PlainExperts):
    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        super().__init__(request, settings)
        self._sums = ExpertSums(request, settings)
        is_even = request.hidden_size % 8 == 0 and request.inner_size % 8 == 0  # rows of whole 16 bytes
        is_plain = settings.dtype in (torch.float16, torch.bfloat16) and not settings.ops.is_invariant
        self._can_group = is_even and is_plain and can_run(settings.device)

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        choice = choose_plain(len(x), num_chosen, logits.shape[1]) if self._can_group else None
        if choice is None:
            return self._sums(x, logits, num_chosen, is_normalised, (self.gate_up, None), (self.down, None), residual)
        request, gate = self.request, self.request.gate
        routing = Routing(
            logits, num_chosen, is_normalised, (request.first, request.num_experts) if request.is_part else None
        )
        biases = (request.gate_up_bias, request.down_bias)
        numbers = (gate.alpha, gate.limit, gate.offset)
        if isinstance(choice, MixedChoice):
            return mixed_experts(x, routing, self.gate_up, self.down, biases, numbers, residual, choice)
        return plain_experts(x, routing, self.gate_up, self.down, biases, numbers, residual, choice)

    def sum_of_few(
        self, x: Tensor, norm: NormWeights, router: RouterWeights, num_chosen: int, is_normalised: bool
    ) -> Tensor | None:
        request, gate = self.request, self.request.gate
        if not self._can_group or request.is_part or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return None
        choice = choose_few_plain(len(x), num_chosen, request.num_experts, request.hidden_size, request.inner_size)
        if choice is None:
            return None
        return plain_experts_of_few(
            x,
            (norm.weight, norm.epsilon),
            router,
            num_chosen,
            is_normalised,
            self.gate_up,
            self.down,
            (request.gate_up_bias, request.down_bias),
            (gate.alpha, gate.limit, gate.offset),
            choice,
        )

    def warm_up(self, num_routed: int, num_chosen: int, is_normalised: bool, max_rows: int) -> None:
        if not self._can_group:
            return
        for count in row_counts(lambda rows: choose_plain(rows, num_chosen, num_routed), max_rows):
            x = self.gate_up.new_empty(count, self.request.hidden_size)
            self.weighted_sum(x, x.new_empty(count, num_routed), num_chosen, is_normalised, x)


class ExpertSums:
    """The kernels' call, for weights that are plain or packed."""

    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        self._request = request
        # None: chosen by the rows of each step.
        self._tiles: Tiles | None = None
        if settings.ops.is_invariant:
            self._tiles = fitting(_INVARIANT_TILES, settings.dtype, settings.device)

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        num_chosen: int,
        is_normalised: bool,
        gate_up: tuple[Tensor, Tensor | None],  # numbers and scales
        down: tuple[Tensor, Tensor | None],
        residual: Tensor | None,
        tiles: Tiles | None = None,
    ) -> Tensor:
        """tiles: for this call, unless those for all are fixed."""
        request, gate = self._request, self._request.gate
        plan = plan_experts(logits, num_chosen, is_normalised, self._tiles or tiles)
        y: Tensor = experts(
            x,
            plan.part(request.first, request.num_experts) if request.is_part else plan,
            ExpertTensors(*gate_up, request.gate_up_bias),
            ExpertTensors(*down, request.down_bias),
            (gate.alpha, gate.limit, gate.offset),
            residual,
        )
        return y


EXPERTS: ExpertsMethod = Method("triton_experts", supports_all, TritonExperts)
