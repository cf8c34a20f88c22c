"""Weights as codes of 4 or 8 bits in groups, on a GPU: as GGUF files, 8-bit checkpoints and checkpoints of 8-bit floats have them, or
rounded so by --quantization int8. Kernels multiply them as they are held; activations keep their 16 bits.

What comes in 4-bit groups that triton_int4 holds is held there: its kernels are faster."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm.groups import group_linear, row_counts
from octavo.kernels.triton.gemm.groups_decode import looked_up
from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.quants import ORDERED, Quants, Weight
from octavo.quants.writers import q8_0
from octavo.weights.methods.as_groups import GROUP_SIZES, as_groups
from octavo.weights.methods.base import (
    HeldTable,
    HeldWeight,
    LinearMethod,
    Method,
    Settings,
    TableMethod,
    Use,
    WeightRequest,
    other_kernels,
)
from octavo.weights.methods.triton_bf16 import TritonWeight
from octavo.weights.methods.triton_invariant import InvariantWeight

_OF_INT4 = frozenset({"Q4_0", "Q5_0"})  # what 4-bit checkpoints arrive as
_PACKINGS = {type: size for type, size in GROUP_SIZES.items() if type not in _OF_INT4}
_PACKINGS |= {f"Q8_0{ORDERED}": GROUP_SIZES["Q8_0"]}
_ROUNDED_GROUP = 32  # columns that share a scale with --quantization int8
_AT_ONCE = 1 << 24  # numbers rounded together: bounds the temporaries


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows of one kind, which are one product."""

    first: int
    groups: Groups


class GroupWeight(HeldWeight, HeldTable):
    """Parts of different kinds (a file may have v more exact than q and k) are products of their own. Where a part has no such form, all are
    held in 16 bits."""

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        super().__init__(settings.ops)
        self._request, self._settings = request, settings
        self._found: dict[int, Groups] = {}  # until all parts are filled
        self._parts: list[_Part] = []
        self._columns: Tensor | None = None  # of x, in the order in which the codes lie
        self._plain: TritonWeight | InvariantWeight | None = None

    @property
    def nbytes(self) -> int:
        if self._plain is not None:
            return self._plain.nbytes
        held = [part.groups for part in self._parts] or list(self._found.values())
        return sum(groups.nbytes for groups in held) + (0 if self._columns is None else self._columns.nbytes)

    @property
    def name(self) -> str:
        return "groups" if self._plain is None else self._plain.name

    def fill(self, part: int, rows: Weight) -> None:
        if self._plain is None:
            if self._fill(part, rows):
                return
            self._decode()
        assert self._plain is not None
        self._plain.fill(part, rows)

    def _fill(self, part: int, rows: Weight) -> bool:
        if not isinstance(rows, Quants):
            if self._settings.quantization != "int8" or self._request.use is not Use.PRODUCT:
                return False
            rows = round_to_8_bits(rows.to(self._settings.device))
        columns = None if rows.columns is None else rows.columns.to(self._settings.device)
        if self._found and not _same(columns, self._columns):
            return False
        groups = as_groups(Quants(rows.type, rows.rows.to(self._settings.device)))
        if groups is None:
            return False
        self._columns = columns
        self._found[part] = groups.padded(self._request.part_sizes[part])
        if len(self._found) == len(self._request.part_sizes):
            self._join()
        return True

    def _join(self) -> None:
        """Make products of the parts."""
        waiting: list[Groups] = []
        first = 0
        for part in range(len(self._request.part_sizes)):
            groups = self._found.pop(part)
            if waiting and waiting[0].kind != groups.kind:
                first = self._end(first, waiting)
                waiting = []
            waiting.append(groups)
        self._end(first, waiting)

    def _end(self, first: int, waiting: list[Groups]) -> int:
        joined = waiting[0].joined(waiting[1:]) if len(waiting) > 1 else waiting[0]
        self._parts.append(_Part(first, joined))
        return first + joined.shape[0]

    def _decode(self) -> None:
        """Hold the weight in 16 bits from now on."""
        make = InvariantWeight if self._settings.ops.is_invariant else TritonWeight
        self._plain = make(self._request, self._settings)
        for part, groups in self._found.items():
            plain = groups.decode()
            if self._columns is not None:
                plain = torch.empty_like(plain).index_copy_(1, self._columns, plain)
            self._plain.fill(part, plain.to(self._settings.dtype))
        self._found, self._columns = {}, None

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        if self._plain is not None:
            return self._plain.product(x, norm, bias, activation)
        x, before = self._rms_normed(x, norm)
        if before is not None:
            x = rms_norm(x, *before, is_fixed=self._settings.ops.is_invariant, pdl=True)
        return activate(self._multiply(x, bias, None), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if self._plain is not None:
            return self._plain.product_add(x, bias, residual)
        return self._multiply(x, bias, residual)

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        return None if self._plain is None else self._plain.gated(x, norm, bias, activation)

    def _multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        assert self._parts, "it is filled first"
        if self._columns is not None:
            x = x.index_select(1, self._columns)
        out = x.new_empty(x.shape[0], self._request.out_features) if residual is None else residual
        for part in self._parts:
            some = slice(part.first, part.first + part.groups.shape[0])
            mine = out[:, some]
            group_linear(
                x, part.groups, mine, bias=None if bias is None else bias[some],
                residual=None if residual is None else mine, pdl=True, is_fixed=self._settings.ops.is_invariant,
            )  # fmt: skip
        return out

    def warm_up_gate(self, activation: Activation, has_bias: bool, max_rows: int) -> None:
        if self._plain is not None:
            self._plain.warm_up_gate(activation, has_bias, max_rows)
            return
        for num_rows in row_counts(max_rows):
            self.product(self._settings.empty(num_rows, self._request.in_features))

    # ── as a table ──────────────────────────────────────────────────────────────────────────────────

    def look_up(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        if self._plain is not None:
            return self._plain.look_up(ids, factor)
        (part,) = self._parts
        return looked_up(part.groups, ids, self._settings.dtype, factor)

    def as_head(self) -> HeldWeight:
        return self if self._plain is None else self._plain.as_head()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def round_to_8_bits(rows: Tensor) -> Quants:
    """[N, K] → the nearest of 255 numbers, evenly spaced around 0, up to each group's largest."""
    parts = []
    step = max(1, _AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        groups = rows[first : first + step].float().view(-1, rows.shape[1] // _ROUNDED_GROUP, _ROUNDED_GROUP)
        # In float16 the step is at least its smallest number, which also keeps it from being 0.
        scales = (groups.abs().amax(dim=2) / 127).clamp_(min=6e-8).to(torch.float16)
        numbers = (groups / scales.float().unsqueeze(2)).round_().clamp_(-127, 127).to(torch.int8)
        parts.append(q8_0(scales, numbers.flatten(1)).stored)
    return Quants("Q8_0", torch.cat(parts))


def _misfit(request: WeightRequest, settings: Settings) -> str | None:
    if settings.dtype not in (torch.float16, torch.bfloat16):
        return "the product takes inputs of 16 bits"
    if request.in_features % _ROUNDED_GROUP or request.out_features % 8:
        return (
            f"the product wants multiples of 8 by {_ROUNDED_GROUP}, not {request.out_features} by {request.in_features}"
        )
    return None


def supports(request: WeightRequest, settings: Settings) -> str | None:
    if settings.ops.kernels != "triton":
        return other_kernels(settings)
    if request.use is Use.ROUTER:
        return "a router's product is torch's"
    if not settings.packed_types & _PACKINGS.keys():
        if settings.quantization != "int8":
            return "neither asked for nor in the checkpoint"
        if request.use is Use.VOCABULARY:
            return "a vocabulary stays more exact"
    return _misfit(request, settings)


def supports_table(request: WeightRequest, settings: Settings) -> str | None:
    if settings.ops.kernels != "triton":
        return other_kernels(settings)
    if not settings.packed_types & _PACKINGS.keys():
        return "not in the checkpoint"
    return _misfit(request, settings)


LINEAR: LinearMethod = Method("triton_groups", supports, GroupWeight, packings=_PACKINGS, keeps_up=False)
TABLE: TableMethod = Method("triton_groups", supports_table, GroupWeight, packings=_PACKINGS)
