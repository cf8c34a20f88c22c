"""GGUF's packed weight types: their decoders, and Quants, a weight that stays packed.

A packed tensor is a sequence of quants of equal size. A quant is what ggml calls a block: some weights and their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from octavo.gguf import TYPES
from octavo.quants.blocks import DECODERS as _BLOCKS
from octavo.quants.tables import DECODERS as _TABLES

# Weights decoded at once: this bounds the temporary memory. torch splits passes over 2**15 elements and more among its
# threads. That pays for a large tensor. For the hundreds of small tensors of a small model it gains little on idle cores,
# and costs a wait per pass on busy ones. On a GPU, few long passes are fastest.
_LARGE = 1 << 22
_AT_ONCE_SMALL, _AT_ONCE_LARGE, _AT_ONCE_GPU = (1 << 15) - 256, 1 << 20, 1 << 24

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Type → (weights, bytes) of a quant. Two are Octavo's own and occur in no GGUF file. IQ2_WIDE: IQ2_XXS with four bits per weight.
# FP8: a scale in float32, then 32 numbers in e4m3.
_OWN = {"IQ2_WIDE": (256, 138), "FP8": (32, 36)}
QUANT = {name: (weights, num_bytes) for name, weights, num_bytes in TYPES.values()} | _OWN
QuantSizes = Mapping[str, tuple[int, int]]  # a table like QUANT, of some types
_DECODERS = _BLOCKS | _TABLES
ORDERED = "+order"
"""After a type's name, where a checkpoint's types are listed: the Quants of this type have their columns in another order."""

PACKED_TYPES = tuple(type for type in _DECODERS if type not in _OWN)
"""Every packed type that can be read from a GGUF file."""


# Byte offsets of the float16 numbers in a quant. MXFP4 has an exponent in its first byte instead.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "MXFP4": (), "IQ2_WIDE": (0,),
    "FP8": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Quants:
    """A weight [N, K] whose rows are sequences of quants. They may lie in a memory-mapped file: copy what you keep."""

    type: str  # one of PACKED_TYPES, IQ2_WIDE or FP8
    stored: Tensor  # [N, bytes of a row] uint8
    order: Tensor | None = None  # [N]: row i is stored[order[i]]; None: the stored order. Rows are copied only on use
    columns: Tensor | None = (
        None  # [K] int64: the stored column i is column columns[i] of the weight; None: they are in order
    )

    def __post_init__(self) -> None:
        assert self.type in _DECODERS and self.stored.dtype == torch.uint8
        assert self.stored.dim() == 2 and self.stored.shape[1] % QUANT[self.type][1] == 0

    @property
    def rows(self) -> Tensor:
        """[N, bytes of a row] uint8."""
        return self.stored if self.order is None else self.stored[self.order]

    @property
    def shape(self) -> tuple[int, int]:
        weights, num_bytes = QUANT[self.type]
        return self.stored.shape[0], self.stored.shape[1] // num_bytes * weights

    def rearranged(self, permute: Callable[[Tensor], Tensor]) -> Quants:
        """Return the weight with its rows permuted. `permute` takes the rows and returns them in another order."""
        identity = torch.arange(len(self.stored))
        new = permute(identity if self.order is None else self.order)
        assert new.shape == identity.shape
        # A permutation that a converter made and a layer undoes costs nothing.
        return Quants(self.type, self.stored, None if torch.equal(new, identity) else new, self.columns)

    def narrow_rows(self, first: int, count: int) -> Quants:
        """Return rows first … first + count − 1, as a view if the rows are in stored order."""
        return Quants(self.type, self.rows.narrow(0, first, count), columns=self.columns)

    def narrow_columns(self, first: int, count: int) -> Quants | None:
        """Return a view of some columns, whose rows are not contiguous. None: the cut would split a quant, or columns are out of
        order, so the weight must be decoded first."""
        weights, num_bytes = QUANT[self.type]
        if first % weights or count % weights or self.columns is not None:
            return None
        return Quants(self.type, self.rows.narrow(1, first // weights * num_bytes, count // weights * num_bytes))

    def is_finite(self) -> bool:
        """Whether every weight is finite. Only scales can be NaN or infinite."""
        quants = self.stored.reshape(-1, QUANT[self.type][1])
        if self.type == "MXFP4":
            return not bool((quants[:, 0] == 255).any())
        if self.type == "FP8":
            scales = quants[:, :4].contiguous().view(torch.float32)
            return bool(scales.isfinite().all()) and not bool((quants[:, 4:] & 0x7F == 0x7F).any())
        # NaN and infinity have all exponent bits set; in a float16 these are in the second byte.
        return not any(bool((quants[:, at + 1] & 0x7C == 0x7C).any()) for at in _HALVES[self.type])

    def dequantise(self) -> Tensor:
        """Decode to [N, K] float32."""
        stored = dequantise(self.rows.contiguous().view(-1), self.type).view(self.shape)
        return stored if self.columns is None else torch.empty_like(stored).index_copy_(1, self.columns, stored)


Weight = Tensor | Quants  # a weight in a checkpoint
SameWeight = TypeVar("SameWeight", Tensor, Quants)  # for functions on whole rows that return the type they were given


def dequantise(packed: Tensor, type: str) -> Tensor:
    """Decode packed [bytes] uint8 to [weights] float32 (or to the stored type if that is a floating-point type)."""
    if type in PLAIN_TYPES:
        return packed.view(PLAIN_TYPES[type])
    decode = _DECODERS[type]
    weights, num_bytes = QUANT[type]
    quants = packed.view(-1, num_bytes)
    out = torch.empty(len(quants), weights, dtype=torch.float32, device=packed.device)
    step = _weights_at_once(out) // weights
    for start in range(0, len(quants), step):
        decode(quants[start : start + step], out[start : start + step])
    return out.view(-1)


def _weights_at_once(out: Tensor) -> int:
    if out.device.type != "cpu":
        return _AT_ONCE_GPU
    return _AT_ONCE_LARGE if out.numel() >= _LARGE else _AT_ONCE_SMALL
