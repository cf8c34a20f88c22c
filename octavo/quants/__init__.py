"""GGUF's packed weights: what is known of each type, and Quants, a weight that stays packed.
Knows nothing of files, of models, or of who multiplies with them.

A packed tensor is a row of equal quants ("quant": some weights and what scales them, ggml's own block)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from octavo.gguf import TYPES
from octavo.quants.blocks import DECODERS as _BLOCKS
from octavo.quants.tables import DECODERS as _TABLES

# Weights decoded at once, which bounds the temporaries. torch shares out passes over 2**15 elements and more among its
# threads: worth it for a large tensor; for the hundreds of small ones of a small model it gains little on idle cores and
# costs a wait for every pass on busy ones. A GPU wants few, long passes.
_LARGE = 1 << 22
_AT_ONCE_SMALL, _AT_ONCE_LARGE, _AT_ONCE_GPU = (1 << 15) - 256, 1 << 20, 1 << 24

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# type → weights and bytes of a quant. IQ2_WIDE is Octavo's own, in no file: IQ2_XXS with four bits for each number.
QUANT = {name: (weights, num_bytes) for name, weights, num_bytes in TYPES.values()} | {"IQ2_WIDE": (256, 138)}
_DECODERS = _BLOCKS | _TABLES

PACKED_TYPES = tuple(type for type in _DECODERS if type != "IQ2_WIDE")
"""Every packed type that can be read."""


# Where a quant's float16 numbers lie; MXFP4 has an exponent in its first byte instead.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "MXFP4": (), "IQ2_WIDE": (0,),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Quants:
    """A weight [N, K] whose rows are quants, one after the other. They may lie in a mapped file: copy what you keep."""

    type: str  # of PACKED_TYPES, or IQ2_WIDE
    stored: Tensor  # [N, bytes of a row] uint8
    order: Tensor | None = None  # [N]: which stored row comes where; None: as they are. Copied only when it must be

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

    def rearranged(self, order: Callable[[Tensor], Tensor]) -> Quants:
        """`order` gets the rows and returns the same ones in another order."""
        plain = torch.arange(len(self.stored))
        new = order(plain if self.order is None else self.order)
        assert new.shape == plain.shape
        # What a converter did and a layer undoes costs nothing.
        return Quants(self.type, self.stored, None if torch.equal(new, plain) else new)

    def narrow_rows(self, first: int, count: int) -> Quants:
        """A view, as of any tensor."""
        return Quants(self.type, self.rows.narrow(0, first, count))

    def narrow_columns(self, first: int, count: int) -> Quants | None:
        """A view, whose rows lie apart; None: the cut would go through a quant, so that only decoded weights can be cut."""
        weights, num_bytes = QUANT[self.type]
        if first % weights or count % weights:
            return None
        return Quants(self.type, self.rows.narrow(1, first // weights * num_bytes, count // weights * num_bytes))

    def is_finite(self) -> bool:
        """Whether every weight is a number: only scales can be none."""
        quants = self.stored.reshape(-1, QUANT[self.type][1])
        if self.type == "MXFP4":
            return not bool((quants[:, 0] == 255).any())
        # All bits of the exponent, which are in a float16's second byte.
        return not any(bool((quants[:, at + 1] & 0x7C == 0x7C).any()) for at in _HALVES[self.type])

    def dequantise(self) -> Tensor:
        """→ [N, K] float32."""
        return dequantise(self.rows.contiguous().view(-1), self.type).view(self.shape)


Weight = Tensor | Quants  # what a checkpoint holds under a name
SameWeight = TypeVar("SameWeight", Tensor, Quants)  # for what is done to rows as a whole: the result is what came


def dequantise(packed: Tensor, type: str) -> Tensor:
    """packed [bytes] uint8 → [weights], float32 (or as stored, where that is a floating-point type)."""
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
