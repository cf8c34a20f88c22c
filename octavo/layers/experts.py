"""Many small gated networks of one shape, each given the tokens that were chosen for it: products grouped by expert.
Knows nothing of routers beyond their logits. Ranks share every expert's inner width.

Three ways to the same sums: the native CPU kernels, in which a token's bits do not depend on its company; Triton kernels on
a GPU, where nothing waits for the counts; torch's grouped product, or a batched one over padded groups where it has none."""

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from octavo.kernels.cpu.experts import Choice, ExpertWeights
from octavo.kernels.cpu.library import PackedWeight
from octavo.layers.context import BuildContext
from octavo.layers.native import NativeWeight, hold_alike
from octavo.layers.sharding import Slot, Slots, padded_share, plain, share, share_columns, share_size
from octavo.quants import Quants, Weight
from octavo.quants.exact import held_exactly

_GROUP = 32  # MXFP4 weights that share a scale


@dataclass(frozen=True, slots=True)
class Gate:
    """gate · sigmoid(alpha · gate) · (up + offset), with gate cut off above the limit and up on both sides of it."""

    alpha: float = 1.0
    limit: float = 0.0  # 0: none
    offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self == Gate()  # silu(gate) · up

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.is_plain:
            return F.silu(gate) * up
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.offset)


class _Packed(nn.Module):
    """One expert's weights for the native kernels."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.gate_up, self.down = NativeWeight.of_parts(context, 2, is_one=True), NativeWeight.of_parts(context)


def _fill(target: torch.Tensor, scales: torch.Tensor | None, weight: Weight) -> None:
    """`scales`: the target holds packed numbers, and these are what they are multiplied with."""
    if scales is None:
        target.copy_(plain(weight))
        return
    assert isinstance(weight, Quants) and weight.type == "MXFP4", "they were to be kept packed"
    quants = weight.rows.reshape(len(target), -1, 1 + _GROUP // 2)  # a scale, then 16 bytes
    scales.copy_(quants[:, :, 0])
    target.copy_(quants[:, :, 1:].flatten(1))


def narrow(weight: Weight, first: int, count: int) -> Weight:
    """So many of its rows, as a view."""
    return weight.narrow_rows(first, count) if isinstance(weight, Quants) else weight[first : first + count]


def _whole(weight: NativeWeight) -> PackedWeight:
    (packed,) = weight.packed
    return packed


class Experts(nn.Module):
    """gate_up and down of every expert, in `members` where the CPU has kernels of its own, else in two tensors. `is_fp4`: they
    come as MXFP4, and are kept so where a kernel multiplies them."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        gate: Gate,
        context: BuildContext,
        bias: bool,
        is_fp4: bool = False,
    ) -> None:
        super().__init__()
        self.group = context.group
        self.gate = gate
        self.num_experts, self.hidden_size, self.whole_inner = num_experts, hidden_size, inner_size
        self.inner_size = share_size(inner_size, context.group)
        self._is_first = context.group.rank == 0  # adds the residual and down's bias, which ranks must count once
        self._native = context.native
        self._kernels = _kernels(context.device)
        self._tiles = None if context.kernels is None else context.kernels.expert_tiles(context.dtype, context.device)
        held = 0 if context.native is not None else num_experts
        # A group of 32 weights cannot be cut: ranks that would have to hold decoded ones.
        is_cut = hidden_size % _GROUP != 0 or self.inner_size % _GROUP != 0
        self.holds_fp4 = is_fp4 and context.keeps_packed and self._kernels is not None and not is_cut
        self.gate_up, self.gate_up_scales = self._room(held, 2 * self.inner_size, hidden_size, context)
        self.down, self.down_scales = self._room(held, hidden_size, self.inner_size, context)
        self.gate_up_bias = context.empty(num_experts, 2 * self.inner_size) if bias else None
        self.down_bias = context.empty(num_experts, hidden_size) if bias and self._is_first else None
        self.has_bias = bias
        self.members = nn.ModuleList(_Packed(context) for _ in range(num_experts if held == 0 else 0))
        self._weights: ExpertWeights | None = None  # of the members, once they are filled
        self._num_missing = 3 * num_experts  # gates, ups and downs

    def _room(
        self, num_experts: int, num_rows: int, width: int, context: BuildContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of [experts, rows, width] weights, and of the scales of packed ones."""
        if not self.holds_fp4:
            return context.empty(num_experts, num_rows, width), None
        sizes = (num_experts, num_rows, width // 2), (num_experts, num_rows, width // _GROUP)
        codes, scales = (torch.empty(size, dtype=torch.uint8, device=context.device) for size in sizes)
        return codes, scales

    def forward(
        self, x: torch.Tensor, logits: torch.Tensor, num_chosen: int, is_normalised: bool, residual: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden], logits [T, experts] → residual + the weighted sum, [T, hidden]. The residual may be changed."""
        if self._native is not None:
            y = self._by_native(x, logits, num_chosen, is_normalised, residual)
        elif self._kernels is not None:
            y = self._kernels.experts(
                x,
                self._kernels.plan(logits, num_chosen, is_normalised, self._tiles),
                self._kernels.Weights(self.gate_up, self.gate_up_scales, self.gate_up_bias),
                self._kernels.Weights(self.down, self.down_scales, self.down_bias),
                (self.gate.alpha, self.gate.limit, self.gate.offset),
                residual if self._is_first else None,
            )
        else:
            y = self._by_torch(x, *choose(logits, num_chosen, is_normalised))
            if self._is_first:
                y = residual.add_(y)
        return y if self.group.size == 1 else self.group.all_reduce(y)

    def _by_native(
        self, x: torch.Tensor, logits: torch.Tensor, num_chosen: int, is_normalised: bool, residual: torch.Tensor
    ) -> torch.Tensor:
        assert self._native is not None
        if self._weights is None:
            gate = self.gate
            self._weights = ExpertWeights(
                [_whole(self._member(expert).gate_up) for expert in range(self.num_experts)],
                [_whole(self._member(expert).down) for expert in range(self.num_experts)],
                self.gate_up_bias,
                self.down_bias,
                Choice(num_chosen, is_normalised, gate.alpha, gate.limit, gate.offset),
            )
        return self._native.experts(x, logits, self._weights, residual if self._is_first else None)

    def _by_torch(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """chosen and weights [T, K]. Pairs of a token and an expert are sorted by expert, and back again."""
        num_tokens, num_chosen = chosen.shape
        experts, order = chosen.flatten().sort(stable=True)  # [T K] each
        counts = torch.bincount(experts, minlength=self.num_experts)  # [E]
        gate_up = grouped_product(x.index_select(0, order // num_chosen), self.gate_up, counts)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias[experts]
        y = grouped_product(self.gate(*gate_up.chunk(2, dim=-1)), self.down, counts)
        if self.down_bias is not None:
            y += self.down_bias[experts]
        pairs = torch.empty_like(y).index_copy_(0, order, y).view(num_tokens, num_chosen, self.hidden_size)
        return (pairs.float() * weights[:, :, None]).sum(dim=1).to(x.dtype)

    # ── filling ─────────────────────────────────────────────────────────────────────────────────────

    def fill_gate_up(self, expert: int, part: int, tensor: Weight) -> None:
        """Part 0: the whole gate [inner, hidden]; 1: up."""
        if self._native is not None:
            self._member(expert).gate_up.fill(part, padded_share(tensor, self.group))
            self._settle()
        else:
            rows = slice(part * self.inner_size, (part + 1) * self.inner_size)
            scales = None if self.gate_up_scales is None else self.gate_up_scales[expert, rows]
            _fill(self.gate_up[expert, rows], scales, padded_share(tensor, self.group))

    def fill_down(self, expert: int, tensor: Weight) -> None:
        """The whole down [hidden, inner]."""
        mine = share_columns(tensor, self.group)
        if self._native is not None:
            self._member(expert).down.fill(0, mine)
            self._settle()
        else:
            scales = None if self.down_scales is None else self.down_scales[expert]
            _fill(self.down[expert], scales, mine)

    def _settle(self) -> None:
        """With the last part: checkpoints that store each expert by itself may have one that cannot be held as the others are."""
        self._num_missing -= 1
        if not self._num_missing:
            members = [self._member(expert) for expert in range(self.num_experts)]
            hold_alike([member.gate_up for member in members])
            hold_alike([member.down for member in members])

    def _member(self, expert: int) -> "_Packed":
        member = self.members[expert]
        assert isinstance(member, _Packed)
        return member

    def fill_biases(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        """[experts, inner] each, whole."""
        assert self.gate_up_bias is not None
        self.gate_up_bias[:, : self.inner_size] = share(gate, 1, self.group)
        self.gate_up_bias[:, self.inner_size :] = share(up, 1, self.group)

    def fill_down_bias(self, tensor: torch.Tensor) -> None:
        if self.down_bias is not None:
            self.down_bias.copy_(tensor)

    def alike(self, stack: Weight) -> Weight:
        """All experts' rows, as they are to be given to fill_gate_up and fill_down: the kernels want a layer's experts in one
        form, so where a number of one cannot be held packed, all are decoded."""
        if self._native is None or not isinstance(stack, Quants):
            return stack
        held = held_exactly(stack)
        return stack.dequantise() if held is None else held

    def _fill_stack(self, stack: Weight, part: int) -> None:
        """Part 0: gates [experts · inner, hidden]; 1: ups; 2: downs [experts · hidden, inner]."""
        stack = self.alike(stack)
        num_rows = self.hidden_size if part == 2 else self.whole_inner
        for expert in range(self.num_experts):
            rows = narrow(stack, expert * num_rows, num_rows)
            if part == 2:
                self.fill_down(expert, rows)
            else:
                self.fill_gate_up(expert, part, rows)

    def stack_slots(self, gate: str, up: str, down: str) -> Slots:
        """For checkpoints that store all experts' rows as one matrix, one expert's after the other's."""
        rows, columns = (
            (self.num_experts * self.whole_inner, self.hidden_size),
            (self.num_experts * self.hidden_size, self.whole_inner),
        )
        return {
            f"{gate}.weight": Slot(rows, lambda stack: self._fill_stack(stack, 0)),
            f"{up}.weight": Slot(rows, lambda stack: self._fill_stack(stack, 1)),
            f"{down}.weight": Slot(columns, lambda stack: self._fill_stack(stack, 2)),
        }

    def slots(self, expert: int, gate: str, up: str, down: str) -> Slots:
        """Of one expert's tensors, for families that store each by itself."""
        rows, columns = (self.whole_inner, self.hidden_size), (self.hidden_size, self.whole_inner)
        return {
            f"{gate}.weight": Slot(rows, lambda tensor: self.fill_gate_up(expert, 0, tensor)),
            f"{up}.weight": Slot(rows, lambda tensor: self.fill_gate_up(expert, 1, tensor)),
            f"{down}.weight": Slot(columns, lambda tensor: self.fill_down(expert, tensor)),
        }


# ── in torch ────────────────────────────────────────────────────────────────────────────────────────


def choose(logits: torch.Tensor, num_chosen: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] → experts [T, K] and their weights, float32: of equal logits those that come first."""
    logits = logits.float()
    ranked, experts = logits.sort(dim=-1, descending=True, stable=True)
    top = ranked[:, :num_chosen]
    whole = top if is_normalised else logits
    return experts[:, :num_chosen], (top - whole.logsumexp(dim=-1, keepdim=True)).exp_()


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [P, K], counts[e] of them after each other for expert e; weights [E, N, K] → [P, N]."""
    if can_group(rows.dtype, rows.device.type) and _is_even(rows.shape[1], rows) and _is_even(weights.shape[1], rows):
        y: torch.Tensor = F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
        return y
    return padded_product(rows, weights, counts)


def padded_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The same as one batched product, each expert's rows padded to the longest."""
    used = counts.nonzero()[:, 0]  # [U]
    counts = counts[used]
    within = torch.arange(int(counts.max()) if len(used) else 0, device=rows.device)  # [L]
    is_row = within < counts[:, None]  # [U, L]
    padded = rows.new_zeros(*is_row.shape, rows.shape[1])
    padded[is_row] = rows
    return torch.bmm(padded, weights[used].transpose(1, 2))[is_row]


def _is_even(size: int, rows: torch.Tensor) -> bool:
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


def _kernels(device: torch.device) -> ModuleType | None:
    """By name: Triton may be missing."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("octavo.kernels.triton.moe.experts")
