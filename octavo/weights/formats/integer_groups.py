"""Integer codes in groups, each group with a scale and a zero point: weight = scale · (code − zero).

If kernels multiply packed weights and the numbers fit one of their types exactly, the weight is repacked into that type
without rounding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.quants import ORDERED, Quants, Weight
from octavo.quants.writers import q4_0, q5_0, q8_0

_AT_ONCE = 1 << 22  # weights decoded together: bounds the temporaries
_GROUP = 32  # weights that share a scale in the kernels' types


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[N, W] int32 → [N, W · 32 / bits] uint8, the lowest bits of each word first. `bits`: 2, 4 or 8."""
    assert bits in (2, 4, 8)
    # Relies on little-endian words; Octavo runs on no other machine.
    found = words.contiguous().view(torch.uint8)
    if bits == 8:
        return found
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return (found.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def weight_of(
    codes: Tensor,  # [N, K] uint8 or int8
    zeros: Tensor | int,  # [N, G], or one number for all
    scales: Tensor,  # [N, G] of a floating-point type
    group_of: Tensor | None,  # [K] the group of each column; None: K / G neighbouring columns each
    keep_packed: bool,
) -> Weight:
    """Make the weight: Quants if `keep_packed` is set and a packed type fits exactly, else float32 [N, K]."""
    num_rows, width = codes.shape
    num_groups = scales.shape[1]
    is_even = width % num_groups == 0
    if (
        group_of is not None
        and is_even
        and torch.equal(group_of.cpu().long(), torch.arange(width) // (width // num_groups))
    ):
        group_of = None
    assert group_of is not None or is_even
    if keep_packed and is_even and (width // num_groups) % _GROUP == 0:
        columns = None if group_of is None else _in_groups(group_of, num_groups)
        if group_of is None or columns is not None:
            packed = _packed(codes if columns is None else codes[:, columns], zeros, scales)
            if packed is not None:
                return packed if columns is None else replace(packed, columns=columns)
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    step = max(1, _AT_ONCE // max(1, width))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        numbers = _numbers(codes[rows], zeros if isinstance(zeros, int) else zeros[rows], group_of, num_groups)
        out[rows] = numbers.float().mul_(_spread(scales[rows].float(), width, group_of))
    return out


def _numbers(codes: Tensor, zeros: Tensor | int, group_of: Tensor | None, num_groups: int) -> Tensor:
    """code − zero as int16 [N, K], which holds any difference of two bytes."""
    wide = codes.to(torch.int16)
    return wide - (zeros if isinstance(zeros, int) else _spread(zeros.to(torch.int16), codes.shape[1], group_of))


def _spread(values: Tensor, width: int, group_of: Tensor | None) -> Tensor:
    """[N, G] → [N, K]: the group's value for every column."""
    if group_of is not None:
        return values[:, group_of.long()]
    return values.repeat_interleave(width // values.shape[1], dim=1)


def _in_groups(group_of: Tensor, num_groups: int) -> Tensor | None:
    """The columns in the order of their groups, as act-order checkpoints were quantised; None: groups differ in size."""
    sizes = torch.bincount(group_of.long(), minlength=num_groups)
    return torch.argsort(group_of, stable=True) if bool((sizes == sizes[0]).all()) else None


def _packed(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> Quants | None:
    """Repack as Q4_0, Q5_0 or Q8_0; None: a scale is not exact in float16, or the numbers span too wide a range."""
    halves = scales.to(torch.float16)
    if not torch.equal(halves.float(), scales.float()):
        return None
    width = codes.shape[1]
    halves = _spread(halves, width // _GROUP, None)
    numbers = _numbers(codes, zeros, None, scales.shape[1])
    least, most = (int(value) for value in torch.aminmax(numbers)) if numbers.numel() else (0, 0)
    if least >= -8 and most < 8:
        return q4_0(halves, (numbers + 8).to(torch.uint8))
    if least >= -16 and most < 16:
        return q5_0(halves, (numbers + 16).to(torch.uint8))
    return q8_0(halves, numbers.to(torch.int8)) if least >= -128 and most < 128 else None


def held_as(bits: int, is_centred: bool, group_size: int, has_order: bool = False) -> str:
    """The type that weight_of probably returns with keep_packed; "": float32. `is_centred`: the zero is in the middle. `has_order`:
    columns are in the order of act-order, which only some kernels take."""
    if group_size % _GROUP:
        return ""
    if bits == 8:
        type = "Q8_0" if is_centred else ""
    else:
        type = "Q4_0" if is_centred or bits < 4 else "Q5_0"
    return type + ORDERED if type and has_order else type
