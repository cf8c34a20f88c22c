"""Exact conversion of types without a kernel to types that have one. Nothing is rounded.

A converted weight takes more bytes than in its file, and far fewer than decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quants import ORDERED, QUANT, Quants, QuantSizes
from octavo.quants.blocks import q3_k_parts
from octavo.quants.tables import FP4_LEVELS, half_power, iq2_xxs_nibbles, levels
from octavo.quants.writers import iq2_wide, q5_0, q6_k

# Type in the file → type in memory, which has a kernel. A type that is missing here has to be decoded.
HELD_AS = {
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0", "Q4_K": "Q4_K", "Q5_K": "Q5_K",
    "Q6_K": "Q6_K", "Q2_K": "Q2_K", "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS", "IQ2_WIDE": "IQ2_WIDE", "IQ2_XXS": "IQ2_WIDE",
    "Q3_K": "Q6_K", "MXFP4": "Q5_0",
}  # fmt: skip

_ON_GPU = frozenset({"FP8", *(f"{type}{ORDERED}" for type in ("Q4_0", "Q5_0", "Q8_0"))})
"""What readers pack for a GPU only."""

_MORE = {"Q2_K": 16}  # extra bytes of a quant in memory: its 4-bit scales and minimums are widened to 8 bits

HELD_SIZES: QuantSizes = {type: (QUANT[held][0], QUANT[held][1] + _MORE.get(type, 0)) for type, held in HELD_AS.items()}
"""Type in the file → (weights, bytes) of a quant in memory."""


def kept_on_cpu(types: frozenset[str]) -> frozenset[str]:
    """Of the types in a checkpoint, those that the CPU's kernels multiply, if only after a conversion or one by one decoded: none where all
    are decoded."""
    return types if types - _ON_GPU else frozenset()


def held_bytes(type: str, num_weights: int, itemsize: int, sizes: QuantSizes = HELD_SIZES) -> int:
    """Bytes that `num_weights` take in memory. `itemsize`: bytes of a decoded weight, as those are whose type `sizes` lacks."""
    if type not in sizes:
        return num_weights * itemsize
    weights, num_bytes = sizes[type]
    return num_weights // weights * num_bytes


def held_exactly(weight: Quants) -> Quants | None:
    """Convert to the type in HELD_AS. None: the weight has to be decoded, because its type is not there or a number does not
    fit."""
    if weight.columns is not None:
        return None
    if HELD_AS.get(weight.type, "") in ("", weight.type):
        return weight if weight.type in HELD_AS else None
    rows = weight.rows
    quants = rows.reshape(-1, QUANT[weight.type][1])
    match weight.type:
        case "Q3_K":
            return _from_q3_k(quants, len(rows))
        case "MXFP4":
            return _from_mxfp4(quants, len(rows))
        case _:
            scales, nibbles = iq2_xxs_nibbles(quants)
            outer = quants[:, :2].contiguous().view(torch.float16)
            return iq2_wide(outer.view(len(rows), -1), scales.view(len(rows), -1), nibbles.view(len(rows), -1))


def _from_q3_k(quants: Tensor, num_rows: int) -> Quants:
    scales, numbers = q3_k_parts(quants)
    outer = quants[:, 108:110].contiguous().view(torch.float16)
    codes = (numbers + 32).view(torch.uint8)
    return q6_k(outer.view(num_rows, -1), scales.view(num_rows, -1), codes.view(num_rows, -1))


def _from_mxfp4(quants: Tensor, num_rows: int) -> Quants | None:
    """The scale is a power of two. float16 holds exponents from −24 to 15, which checkpoints hardly ever exceed."""
    exponents = quants[:, 0].int() - 128
    if len(exponents) and not -24 <= int(exponents.min()) <= int(exponents.max()) <= 15:
        return None
    scales = half_power(quants[:, 0]).to(torch.float16)
    codes = (_in_order(quants[:, 1:], FP4_LEVELS) + 16).view(torch.uint8)
    return q5_0(scales.view(num_rows, -1), codes.view(num_rows, -1))


def _in_order(nibbles: Tensor, table: tuple[int, ...]) -> Tensor:
    """Look up [N, 16] bytes of nibbles, low nibbles first, in the table: int8 [N, 32]."""
    return levels(table, torch.cat((nibbles & 15, nibbles >> 4), dim=1))
