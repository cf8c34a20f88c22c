"""GGUF's packed weights: what the bytes of each type mean, and Quants, a weight that stays packed.
Knows nothing of files, of models, or of who multiplies with them.

A packed tensor is a row of equal quants ("quant": some weights and what scales them, ggml's own block). Each decoder takes
packed [N, bytes of a quant] uint8 and fills out [N, weights of a quant] float32. Layouts: ggml-quants.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from octavo.gguf import TYPES

# Weights decoded at once, which bounds the temporaries. torch shares out passes over 2**15 elements and more among its
# threads: worth it for a large tensor; for the hundreds of small ones of a small model it gains little on idle cores and
# costs a wait for every pass on busy ones. A GPU wants few, long passes.
_LARGE = 1 << 22
_AT_ONCE_SMALL, _AT_ONCE_LARGE, _AT_ONCE_GPU = (1 << 15) - 256, 1 << 20, 1 << 24

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANT = {name: (weights, num_bytes) for name, weights, num_bytes in TYPES.values()}


@dataclass(frozen=True, slots=True, eq=False)
class Quants:
    """A weight [N, K] whose rows are quants, one after the other. They may lie in a mapped file: copy what you keep."""

    type: str  # of PACKED_TYPES
    stored: Tensor  # [N, bytes of a row] uint8
    order: Tensor | None = None  # [N]: which stored row comes where; None: as they are. Copied only when it must be

    def __post_init__(self) -> None:
        assert self.type in _DECODERS and self.stored.dtype == torch.uint8
        assert self.stored.dim() == 2 and self.stored.shape[1] % _QUANT[self.type][1] == 0

    @property
    def rows(self) -> Tensor:
        """[N, bytes of a row] uint8."""
        return self.stored if self.order is None else self.stored[self.order]

    @property
    def shape(self) -> tuple[int, int]:
        weights, num_bytes = _QUANT[self.type]
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
        weights, num_bytes = _QUANT[self.type]
        if first % weights or count % weights:
            return None
        return Quants(self.type, self.rows.narrow(1, first // weights * num_bytes, count // weights * num_bytes))

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
    weights, num_bytes = _QUANT[type]
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


def _half(quants: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each quant, as float32 [N, 1]."""
    return quants[:, at : at + 2].view(torch.float16).float()


def _nibbles(quants: Tensor, at: int, count: int) -> tuple[Tensor, Tensor]:
    """The low and the high halves of `count` bytes, uint8 [N, count] each."""
    # Copied once: every later pass over strided bytes would cost more than the copy.
    both = quants[:, at : at + count].contiguous()
    return both & 15, both >> 4


def _bits(quants: Tensor, at: int) -> Tensor:
    """The 32 bits at byte `at` of each quant, lowest first, as uint8 [N, 32] of 0 or 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
    return (quants[:, at : at + 4, None] >> shifts & 1).view(-1, 32)


def _q4_0(quants: Tensor, out: Tensor) -> None:
    scale = _half(quants, 0)
    low, high = _nibbles(quants, 2, 16)
    torch.mul(low.float().sub_(8), scale, out=out[:, :16])
    torch.mul(high.float().sub_(8), scale, out=out[:, 16:])


def _q4_1(quants: Tensor, out: Tensor) -> None:
    scale, least = _half(quants, 0), _half(quants, 2)
    low, high = _nibbles(quants, 4, 16)
    torch.addcmul(least, low.float(), scale, out=out[:, :16])
    torch.addcmul(least, high.float(), scale, out=out[:, 16:])


def _q5_0(quants: Tensor, out: Tensor) -> None:
    scale, fifth = _half(quants, 0), _bits(quants, 2) << 4
    low, high = _nibbles(quants, 6, 16)
    torch.mul((low | fifth[:, :16]).float().sub_(16), scale, out=out[:, :16])
    torch.mul((high | fifth[:, 16:]).float().sub_(16), scale, out=out[:, 16:])


def _q5_1(quants: Tensor, out: Tensor) -> None:
    scale, least, fifth = _half(quants, 0), _half(quants, 2), _bits(quants, 4) << 4
    low, high = _nibbles(quants, 8, 16)
    torch.addcmul(least, (low | fifth[:, :16]).float(), scale, out=out[:, :16])
    torch.addcmul(least, (high | fifth[:, 16:]).float(), scale, out=out[:, 16:])


def _q8_0(quants: Tensor, out: Tensor) -> None:
    out.copy_(quants[:, 2:].view(torch.int8)).mul_(_half(quants, 0))


def _six_bit_scales(quants: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least, float32 [N, 8, 1] each, of the eight 32-weight parts of a Q4_K or Q5_K quant.

    Twelve bytes hold eight 6-bit pairs: the first four pairs in the low bits of bytes 0-3 and 4-7, the last four in the
    nibbles of bytes 8-11, their top two bits in what bytes 0-7 have left.
    """
    first, second, mixed = quants[:, 4:8], quants[:, 8:12], quants[:, 12:16]
    scale = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=1).float()
    least = torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=1).float()
    return scale.mul_(_half(quants, 0)).unsqueeze(2), least.mul_(_half(quants, 2)).unsqueeze(2)


def _q4_k(quants: Tensor, out: Tensor) -> None:
    scale, least = _six_bit_scales(quants)
    low, high = (half.view(-1, 4, 32).float() for half in _nibbles(quants, 16, 128))
    parts = out.view(-1, 8, 32)  # 32 bytes carry two parts: low halves the even one, high halves the odd one
    torch.addcmul(-least[:, 0::2], low, scale[:, 0::2], out=parts[:, 0::2])
    torch.addcmul(-least[:, 1::2], high, scale[:, 1::2], out=parts[:, 1::2])


def _q5_k(quants: Tensor, out: Tensor) -> None:
    scale, least = _six_bit_scales(quants)
    low, high = (half.view(-1, 4, 32) for half in _nibbles(quants, 48, 128))
    # Bit p of byte i is the fifth bit of weight i of part p.
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device).view(8, 1)
    fifth = (quants[:, None, 16:48] >> shifts & 1) << 4  # [N, 8, 32]
    parts = out.view(-1, 8, 32)
    torch.addcmul(-least[:, 0::2], (low | fifth[:, 0::2]).float(), scale[:, 0::2], out=parts[:, 0::2])
    torch.addcmul(-least[:, 1::2], (high | fifth[:, 1::2]).float(), scale[:, 1::2], out=parts[:, 1::2])


def _q6_k(quants: Tensor, out: Tensor) -> None:
    scale = quants[:, 192:208].view(torch.int8).float().mul_(_half(quants, 208))  # [N, 16], one per 16 weights
    # Two halves of 128 weights, each four parts of 32: parts 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones.
    low, high = (half.view(-1, 2, 1, 2, 32) for half in _nibbles(quants, 0, 128))
    four = torch.cat([low, high], dim=2).view(-1, 2, 4, 32)
    # Bits 2p and 2p+1 of byte i are the top two of weight i of part p.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device).view(4, 1)
    two = quants[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3  # [N, 2, 4, 32]
    centred = (four | (two << 4)).float().sub_(32)
    torch.mul(centred.view(-1, 16, 16), scale.unsqueeze(2), out=out.view(-1, 16, 16))


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip

PACKED_TYPES = tuple(_DECODERS)
"""Every packed type that can be read."""
