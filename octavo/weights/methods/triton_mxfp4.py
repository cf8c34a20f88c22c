"""Experts as the MXFP4 codes and scales they come in, on a GPU: Triton kernels multiply them as they are stored."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_ops import NormWeights
from octavo.kernels.triton.moe import mxfp4_layout
from octavo.kernels.triton.moe.expert_plan import Tiles, fitting
from octavo.kernels.triton.moe.grouped import (
    Routing,
    can_run,
    choose_few_packed,
    choose_packed,
    packed_experts,
    packed_experts_of_few,
    row_counts,
)
from octavo.quants import QUANT, Quants, Weight
from octavo.weights.methods.base import (
    ExpertsMethod,
    ExpertsRequest,
    HeldExperts,
    Method,
    RouterWeights,
    Settings,
)
from octavo.weights.methods.triton_experts import ExpertSums

_TYPE = "MXFP4"
_GROUP = 32  # weights that share a scale
# Up to so many pairs of a token and an expert these tiles are the fastest, by `benchmarks/kernels/int4.py experts` on an H200.
_FEW_PAIRS, _FEW_TILES = 16, Tiles(16, 32, 256, 4, 4)


class Mxfp4Experts(HeldExperts):
    name = "mxfp4"

    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        self._request, self._sums = request, ExpertSums(request, settings)
        self.gate_up = _room(request.num_experts, 2 * request.inner_size, request.hidden_size, settings.device)
        self.down = _room(request.num_experts, request.hidden_size, request.inner_size, settings.device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.gate_up, *self.down))

    def fill_gate_up(self, expert: int, part: int, rows: Weight) -> None:
        inner, (codes, scales) = self._request.inner_size, self.gate_up
        to = slice(part * inner, (part + 1) * inner)
        _fill(codes[expert, to], scales[expert, to], rows)

    def fill_down(self, expert: int, columns: Weight) -> None:
        codes, scales = self.down
        _fill(codes[expert], scales[expert], columns)

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        is_small = x.dtype == torch.bfloat16 and x.shape[0] * num_chosen <= _FEW_PAIRS
        tiles = fitting(_FEW_TILES, x.dtype, x.device) if is_small else None
        return self._sums(x, logits, num_chosen, is_normalised, self.gate_up, self.down, residual, tiles)


class HopperMxfp4Experts(HeldExperts):
    """The same numbers in the order in which the tensor cores' threads need them; the padding of K takes up to 3 % more memory for
    widths like 2880."""

    name = "mxfp4"

    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        self._request, self._is_fixed = request, settings.ops.is_invariant
        num, inner, hidden = request.num_experts, request.inner_size, request.hidden_size
        self.gate_up = mxfp4_layout.make_room(num, 2 * inner, hidden, settings.device, is_interleaved=True)
        self.down = mxfp4_layout.make_room(num, hidden, inner, settings.device, is_interleaved=False)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def fill_gate_up(self, expert: int, part: int, rows: Weight) -> None:
        inner = self._request.inner_size
        mxfp4_layout.store(self.gate_up, expert, part * inner, *self._parts(rows, inner))

    def fill_down(self, expert: int, columns: Weight) -> None:
        mxfp4_layout.store(self.down, expert, 0, *self._parts(columns, self._request.hidden_size))

    def _parts(self, weight: Weight, num_rows: int) -> tuple[Tensor, Tensor]:
        """Codes and scales on the device, of num_rows rows: what is missing is zeros."""
        assert isinstance(weight, Quants) and weight.type == _TYPE, "they were to be kept packed"
        rows = weight.rows.to(self.gate_up.words.device).reshape(weight.shape[0], -1, 1 + _GROUP // 2)
        rows = F.pad(rows, (0, 0, 0, 0, 0, num_rows - len(rows)))
        return rows[:, :, 1:].flatten(1), rows[:, :, 0]

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        request, gate = self._request, self._request.gate
        held = (request.first, request.num_experts) if request.is_part else None
        return packed_experts(
            x,
            Routing(logits, num_chosen, is_normalised, held),
            self.gate_up,
            self.down,
            (request.gate_up_bias, request.down_bias),
            (gate.alpha, gate.limit, gate.offset),
            residual,
            choose_packed(len(x), num_chosen, logits.shape[1], self._is_fixed),
        )

    def sum_of_few(
        self, x: Tensor, norm: NormWeights, router: RouterWeights, num_chosen: int, is_normalised: bool
    ) -> Tensor | None:
        request, gate = self._request, self._request.gate
        choice = choose_few_packed(len(x), num_chosen, request.num_experts, request.hidden_size, request.inner_size)
        if choice is None or self._is_fixed or request.is_part or not x.is_contiguous():
            return None
        return packed_experts_of_few(
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
        device = self.gate_up.words.device
        for count in row_counts(lambda rows: choose_packed(rows, num_chosen, num_routed, self._is_fixed), max_rows):
            x = torch.empty(count, self._request.hidden_size, dtype=torch.bfloat16, device=device)
            logits = torch.empty(count, num_routed, dtype=torch.bfloat16, device=device)
            self.weighted_sum(x, logits, num_chosen, is_normalised, x)


def _room(num_experts: int, num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte, and scales."""
    sizes = (num_experts, num_rows, width // 2), (num_experts, num_rows, width // _GROUP)
    codes, scales = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    return codes, scales


def _fill(codes: Tensor, scales: Tensor, weight: Weight) -> None:
    assert isinstance(weight, Quants) and weight.type == _TYPE, "they were to be kept packed"
    count = weight.shape[0]
    quants = weight.rows.reshape(count, -1, 1 + _GROUP // 2)  # a scale, then 16 bytes
    scales[:count].copy_(quants[:, :, 0])
    codes[:count].copy_(quants[:, :, 1:].flatten(1))
    scales[count:].zero_()
    codes[count:].zero_()


def supports(request: ExpertsRequest, settings: Settings) -> str | None:
    if request.packed_type != _TYPE or _TYPE not in settings.packed_types:
        return "they do not come as MXFP4"
    if request.hidden_size % _GROUP or request.inner_size % _GROUP:
        return f"a group of {_GROUP} weights would be cut, so that this rank's must be decoded"
    return None


def _hold(request: ExpertsRequest, settings: Settings) -> HeldExperts:
    is_for_hopper = settings.dtype == torch.bfloat16 and can_run(settings.device)
    return (HopperMxfp4Experts if is_for_hopper else Mxfp4Experts)(request, settings)


EXPERTS: ExpertsMethod = Method("triton_mxfp4", supports, _hold, packings={_TYPE: QUANT[_TYPE]})
