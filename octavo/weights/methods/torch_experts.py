"""Experts as two plain tensors, multiplied by torch: its grouped product, or a batched one over padded groups where it has
none. On any device."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.quants import Weight
from octavo.weights.methods.base import (
    ExpertsMethod,
    ExpertsRequest,
    HeldExperts,
    Method,
    Settings,
    decoded,
    dtype_name,
    supports_all,
)


class PlainExperts(HeldExperts):
    def __init__(self, request: ExpertsRequest, settings: Settings) -> None:
        self.request = request
        inner, hidden = request.inner_size, request.hidden_size
        self.gate_up = settings.empty(request.num_experts, 2 * inner, hidden)
        self.down = settings.empty(request.num_experts, hidden, inner)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def name(self) -> str:
        return dtype_name(self.gate_up.dtype)

    def fill_gate_up(self, expert: int, part: int, rows: Weight) -> None:
        inner, mine = self.request.inner_size, decoded(rows)
        target = self.gate_up[expert, part * inner : (part + 1) * inner]
        target[: len(mine)].copy_(mine)
        target[len(mine) :].zero_()

    def fill_down(self, expert: int, columns: Weight) -> None:
        self.down[expert].copy_(decoded(columns))

    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        y = self._sum(x, *choose(logits, num_chosen, is_normalised))
        return y if residual is None else residual.add_(y)

    def _sum(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """chosen and weights [T, K]. Pairs of a token and an expert are sorted by expert, and back again."""
        request = self.request
        num_tokens, num_chosen = chosen.shape
        experts, order = chosen.flatten().sort(stable=True)  # [T K] each
        if request.is_part:
            experts = experts - request.first
            is_here = (experts >= 0) & (experts < request.num_experts)
            experts, order = experts[is_here], order[is_here]
        counts = torch.bincount(experts, minlength=request.num_experts)  # [E]
        gate_up = grouped_product(x.index_select(0, order // num_chosen), self.gate_up, counts)
        if request.gate_up_bias is not None:
            gate_up += request.gate_up_bias[experts]
        y = grouped_product(request.gate(*gate_up.chunk(2, dim=-1)), self.down, counts)
        if request.down_bias is not None:
            y += request.down_bias[experts]
        pairs = y.new_zeros(num_tokens * num_chosen, request.hidden_size).index_copy_(0, order, y)
        pairs = pairs.view(num_tokens, num_chosen, request.hidden_size)
        return (pairs.float() * weights[:, :, None]).sum(dim=1).to(x.dtype)


def choose(logits: Tensor, num_chosen: int, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] → experts [T, K] and their weights, float32: of equal logits those that come first."""
    logits = logits.float()
    ranked, experts = logits.sort(dim=-1, descending=True, stable=True)
    top = ranked[:, :num_chosen]
    pool = top if is_normalised else logits
    return experts[:, :num_chosen], (top - pool.logsumexp(dim=-1, keepdim=True)).exp_()


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [P, K], counts[e] of them after each other for expert e; weights [E, N, K] → [P, N]."""
    if can_group(rows.dtype, rows.device.type) and _is_even(rows.shape[1], rows) and _is_even(weights.shape[1], rows):
        y: Tensor = F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
        return y
    return padded_product(rows, weights, counts)


def padded_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The same as one batched product, each expert's rows padded to the longest."""
    used = counts.nonzero()[:, 0]  # [U]
    counts = counts[used]
    within = torch.arange(int(counts.max()) if len(used) else 0, device=rows.device)  # [L]
    is_row = within < counts[:, None]  # [U, L]
    padded = rows.new_zeros(*is_row.shape, rows.shape[1])
    padded[is_row] = rows
    return torch.bmm(padded, weights[used].transpose(1, 2))[is_row]


def _is_even(size: int, rows: Tensor) -> bool:
    """torch's grouped product wants rows of whole 16 bytes."""
    return size * rows.element_size() % 16 == 0


@functools.cache
def can_group(dtype: torch.dtype, device_type: str) -> bool:
    """Whether this torch has a grouped product for that type, and one that is right."""
    rows = torch.arange(48, dtype=dtype, device=device_type).view(3, 16)
    weights = torch.stack((torch.eye(16), torch.eye(16), 2 * torch.eye(16))).to(rows)
    try:
        found = F.grouped_mm(rows, weights, offs=torch.tensor([1, 1, 3], dtype=torch.int32, device=device_type))
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        return False
    return torch.equal(found, torch.cat((rows[:1], 2 * rows[1:])))


EXPERTS: ExpertsMethod = Method("torch_experts", supports_all, PlainExperts)
