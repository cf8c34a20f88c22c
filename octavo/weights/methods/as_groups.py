"""Weights in packed types as Groups, which a GPU's kernels multiply: nothing is rounded. Five and six bits become eight."""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.triton.gemm.groups_layout import Groups
from octavo.quants import Quants, QuantSizes
from octavo.quants.blocks import nibbles, six_bit_parts
from octavo.quants.exact import held_exactly
from octavo.quants.tables import IQ4_LEVELS, levels

_AT_ONCE = 1 << 24  # weights converted together: bounds the temporaries

GROUP_SIZES: QuantSizes = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 34), "Q5_1": (32, 36), "Q8_0": (32, 34), "Q4_K": (256, 148),
    "Q5_K": (256, 276), "Q6_K": (256, 274), "Q3_K": (256, 274), "IQ4_NL": (32, 34), "IQ4_XS": (256, 266), "FP8": (32, 36),
}  # fmt: skip
"""Types of Quants that become Groups, each with the (weights, bytes) of a quant as Groups. Groups with equal scales are joined, so FP8 takes less."""


def as_groups(weight: Quants) -> Groups | None:
    """The same weight; None: its type has no such form, or it must be decoded."""
    if weight.type not in GROUP_SIZES:
        return None
    num_rows, width = weight.shape
    step = max(1, _AT_ONCE // max(1, width))
    parts = []
    for first in range(0, num_rows, step):
        part = _converted(weight.narrow_rows(first, min(step, num_rows - first)))
        if part is None:
            return None
        parts.append(part)
    return _merged(parts[0].joined(parts[1:]) if len(parts) > 1 else parts[0]) if parts else None


def _merged(groups: Groups) -> Groups:
    """Neighbouring groups with equal scales become one: checkpoints' groups are larger than a quant."""
    while groups.outer is None and groups.minimums is None and groups.scales.shape[1] % 2 == 0:
        pairs = groups.scales.view(len(groups.scales), -1, 2)
        if not torch.equal(pairs[:, :, 0], pairs[:, :, 1]):
            break
        groups = replace(groups, scales=pairs[:, :, 0].contiguous(), group_size=2 * groups.group_size)
    return groups


def _converted(weight: Quants) -> Groups | None:
    if weight.type == "Q3_K":
        exact = held_exactly(weight)
        return None if exact is None else _converted(exact)
    rows = weight.rows
    num_rows, width = weight.shape
    quants = rows.reshape(-1, rows.shape[1] * (256 if weight.type in _LONG else 32) // width)

    def of_row(tensor: Tensor) -> Tensor:
        return tensor.reshape(num_rows, -1).contiguous()

    def halves(at: int) -> Tensor:
        return of_row(quants[:, at : at + 2].contiguous().view(torch.float16))

    match weight.type:
        case "Q4_0":
            return Groups(of_row(quants[:, 2:]), halves(0), 32, zero=8)
        case "Q4_1":
            return Groups(of_row(quants[:, 4:]), halves(0), 32, minimums=halves(2))
        case "Q5_0":
            return Groups(of_row(_five_bits(quants, 2)).view(torch.int8), halves(0), 32, zero=16)
        case "Q5_1":
            return Groups(of_row(_five_bits(quants, 4)).view(torch.int8), halves(0), 32, minimums=halves(2))
        case "Q8_0":
            return Groups(of_row(quants[:, 2:]).view(torch.int8), halves(0), 32)
        case "IQ4_NL":
            codes = levels(IQ4_LEVELS, torch.cat(nibbles(quants, 2, 16), dim=1))
            return Groups(of_row(codes), halves(0), 32)
        case "FP8":
            scales = of_row(quants[:, :4].contiguous().view(torch.float32))
            return Groups(of_row(quants[:, 4:]).view(torch.float8_e4m3fn), scales, 32)
        case "Q4_K":
            low, high = (part.view(-1, 4, 1, 32) for part in nibbles(quants, 16, 128))
            parts = torch.cat((low, high), dim=2)  # [N, 4, 2, 32]: 32 bytes hold two parts
            return _with_minimums(quants, of_row(parts[..., :16] | parts[..., 16:] << 4), num_rows)
        case "Q5_K":
            low, high = (part.view(-1, 4, 1, 32) for part in nibbles(quants, 48, 128))
            shifts = torch.arange(8, dtype=torch.uint8, device=quants.device).view(8, 1)
            fifth = (quants[:, None, 16:48] >> shifts & 1) << 4  # [N, 8, 32]
            codes = torch.cat((low, high), dim=2).view(-1, 8, 32) | fifth
            return _with_minimums(quants, of_row(codes).view(torch.int8), num_rows)
        case "Q6_K":
            low, high = (part.view(-1, 2, 1, 2, 32) for part in nibbles(quants, 0, 128))
            four = torch.cat((low, high), dim=2).view(-1, 2, 4, 32)
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device).view(4, 1)
            two = quants[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3
            codes = (four | two << 4).view(torch.int8) - 32
            return Groups(of_row(codes), of_row(quants[:, 192:208]).view(torch.int8), 16, outer=halves(208))
        case "IQ4_XS":
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device)
            top = (quants[:, 2:4, None] >> shifts & 3).view(-1, 8)
            scales = (torch.stack(nibbles(quants, 4, 4), dim=2).view(-1, 8) | top << 4).view(torch.int8) - 32
            first, second = (part.view(-1, 8, 16) for part in nibbles(quants, 8, 128))
            codes = levels(IQ4_LEVELS, torch.cat((first, second), dim=2))
            return Groups(of_row(codes), of_row(scales), 32, outer=halves(0))
        case _:
            raise AssertionError(weight.type)


_LONG = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # types with 256 weights in a quant


def _five_bits(quants: Tensor, at: int) -> Tensor:
    """Codes [N, 32]: bits of the fifth at byte `at`, then sixteen bytes of nibbles."""
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
    fifth = (quants[:, at : at + 4, None] >> shifts & 1).view(-1, 32)
    return torch.cat(nibbles(quants, at + 4, 16), dim=1) | fifth << 4


def _with_minimums(quants: Tensor, codes: Tensor, num_rows: int) -> Groups:
    """Of Q4_K and Q5_K: scale · code − minimum, both in two steps."""
    scales, minimums = (part.reshape(num_rows, -1).contiguous() for part in six_bit_parts(quants))
    outer = quants[:, :4].contiguous().view(torch.float16)  # [N, 2]
    scale, minimum = (outer[:, place].reshape(num_rows, -1).contiguous() for place in (0, 1))
    return Groups(codes, scales.view(torch.int8), 32, 0, scale, minimums, -minimum)
