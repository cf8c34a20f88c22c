"""Experts as two plain tensors on a GPU, multiplied by Triton kernels: nothing waits for the counts of rows."""

from torch import Tensor

from octavo.kernels.triton.moe.expert_plan import Tiles, fitting
from octavo.kernels.triton.moe.experts import ExpertTensors, experts, plan_experts
from octavo.weights.methods.base import ExpertsMethod, ExpertsRequest, Method, Settings, supports_all
from octavo.weights.methods.torch_experts import PlainExperts

# With --deterministic one cut serves every number of rows: another would take another matrix instruction.
_INVARIANT_TILES = Tiles(64, 64, 64, 4, 3)


class TritonExperts(PlainExperts):
    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        super().__init__(request, settings)
        self._sums = ExpertSums(request, settings)

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        gate_up, down = (self.gate_up, None), (self.down, None)
        return self._sums(x, logits, num_chosen, is_normalised, gate_up, down, residual)


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
