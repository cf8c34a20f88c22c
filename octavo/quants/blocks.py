"""Decoders of the types whose weights are a scale times an integer, with or without a minimum.
Each takes quants [N, bytes of a quant] uint8 and fills out [N, weights of a quant] float32.

The layouts are in ggml-quants.h. The operations and their order are those of the reference decoders, so that every bit is the
same."""

from collections.abc import Callable

import torch
from torch import Tensor

Decoder = Callable[[Tensor, Tensor], None]


def half(quants: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each quant, as float32 [N, 1]."""
    return quants[:, at : at + 2].view(torch.float16).float()


def nibbles(quants: Tensor, at: int, count: int) -> tuple[Tensor, Tensor]:
    """The low and the high halves of `count` bytes, uint8 [N, count] each."""
    # Copied once: every later pass over strided bytes would cost more than the copy.
    both = quants[:, at : at + count].contiguous()
    return both & 15, both >> 4


def _bits(quants: Tensor, at: int) -> Tensor:
    """The 32 bits at byte `at` of each quant, lowest first, as uint8 [N, 32] of 0 or 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
    return (quants[:, at : at + 4, None] >> shifts & 1).view(-1, 32)


def _q4_0(quants: Tensor, out: Tensor) -> None:
    scale = half(quants, 0)
    low, high = nibbles(quants, 2, 16)
    torch.mul(low.float().sub_(8), scale, out=out[:, :16])
    torch.mul(high.float().sub_(8), scale, out=out[:, 16:])


def _q4_1(quants: Tensor, out: Tensor) -> None:
    scale, least = half(quants, 0), half(quants, 2)
    low, high = nibbles(quants, 4, 16)
    torch.addcmul(least, low.float(), scale, out=out[:, :16])
    torch.addcmul(least, high.float(), scale, out=out[:, 16:])


def _q5_0(quants: Tensor, out: Tensor) -> None:
    scale, fifth = half(quants, 0), _bits(quants, 2) << 4
    low, high = nibbles(quants, 6, 16)
    torch.mul((low | fifth[:, :16]).float().sub_(16), scale, out=out[:, :16])
    torch.mul((high | fifth[:, 16:]).float().sub_(16), scale, out=out[:, 16:])


def _q5_1(quants: Tensor, out: Tensor) -> None:
    scale, least, fifth = half(quants, 0), half(quants, 2), _bits(quants, 4) << 4
    low, high = nibbles(quants, 8, 16)
    torch.addcmul(least, (low | fifth[:, :16]).float(), scale, out=out[:, :16])
    torch.addcmul(least, (high | fifth[:, 16:]).float(), scale, out=out[:, 16:])


def _q8_0(quants: Tensor, out: Tensor) -> None:
    out.copy_(quants[:, 2:].view(torch.int8)).mul_(half(quants, 0))


def _fp8(quants: Tensor, out: Tensor) -> None:
    torch.mul(
        quants[:, 4:].contiguous().view(torch.float8_e4m3fn).float(),
        quants[:, :4].contiguous().view(torch.float32),
        out=out,
    )


def six_bit_parts(quants: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scale and minimum, uint8 [N, 8] each, of the eight 32-weight parts of a Q4_K or Q5_K quant.

    Twelve bytes hold eight 6-bit pairs: the first four pairs in the low bits of bytes 0-3 and 4-7, the last four in the
    nibbles of bytes 8-11, with their top two bits in the remaining bits of bytes 0-7.
    """
    first, second, mixed = quants[:, 4:8], quants[:, 8:12], quants[:, 12:16]
    scale = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=1)
    least = torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=1)
    return scale, least


def _six_bit_scales(quants: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, float32 [N, 8, 1] each, of the parts of a Q4_K or Q5_K quant."""
    scale, least = (part.float() for part in six_bit_parts(quants))
    return scale.mul_(half(quants, 0)).unsqueeze(2), least.mul_(half(quants, 2)).unsqueeze(2)


def _q4_k(quants: Tensor, out: Tensor) -> None:
    scale, least = _six_bit_scales(quants)
    low, high = (half.view(-1, 4, 32).float() for half in nibbles(quants, 16, 128))
    parts = out.view(
        -1, 8, 32
    )  # 32 bytes hold two parts: the even one in the low nibbles, the odd one in the high ones
    torch.addcmul(-least[:, 0::2], low, scale[:, 0::2], out=parts[:, 0::2])
    torch.addcmul(-least[:, 1::2], high, scale[:, 1::2], out=parts[:, 1::2])


def _q5_k(quants: Tensor, out: Tensor) -> None:
    scale, least = _six_bit_scales(quants)
    low, high = (half.view(-1, 4, 32) for half in nibbles(quants, 48, 128))
    # Bit p of byte i is the fifth bit of weight i of part p.
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device).view(8, 1)
    fifth = (quants[:, None, 16:48] >> shifts & 1) << 4  # [N, 8, 32]
    parts = out.view(-1, 8, 32)
    torch.addcmul(-least[:, 0::2], (low | fifth[:, 0::2]).float(), scale[:, 0::2], out=parts[:, 0::2])
    torch.addcmul(-least[:, 1::2], (high | fifth[:, 1::2]).float(), scale[:, 1::2], out=parts[:, 1::2])


def _q6_k(quants: Tensor, out: Tensor) -> None:
    scale = quants[:, 192:208].view(torch.int8).float().mul_(half(quants, 208))  # [N, 16], one per 16 weights
    # Two halves of 128 weights, each four parts of 32: parts 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones.
    low, high = (half.view(-1, 2, 1, 2, 32) for half in nibbles(quants, 0, 128))
    four = torch.cat([low, high], dim=2).view(-1, 2, 4, 32)
    # Bits 2p and 2p+1 of byte i are the top two of weight i of part p.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device).view(4, 1)
    two = quants[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3  # [N, 2, 4, 32]
    centred = (four | (two << 4)).float().sub_(32)
    torch.mul(centred.view(-1, 16, 16), scale.unsqueeze(2), out=out.view(-1, 16, 16))


def _q2_k(quants: Tensor, out: Tensor) -> None:
    # 16 parts of 16 weights: one byte per part holds its scale and minimum, 4 bits each.
    low, high = nibbles(quants, 0, 16)
    scale, least = low.float().mul_(half(quants, 80)), high.float().mul_(half(quants, 82))
    weights = two_bits(quants, 16).view(-1, 16, 16).float()
    torch.addcmul(-least.unsqueeze(2), weights, scale.unsqueeze(2), out=out.view(-1, 16, 16))


def _q3_k(quants: Tensor, out: Tensor) -> None:
    scale, centred = q3_k_parts(quants)
    torch.mul(centred.float(), (scale.float() * half(quants, 108)).unsqueeze(2), out=out.view(-1, 16, 16))


def q3_k_parts(quants: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 tensors: the scales [N, 16] that multiply the quant's own scale, and the weights [N, 16, 16] as integers from
    −4 to 3.

    Twelve bytes hold 16 scales of 6 bits: the low four bits in the nibbles of bytes 0-7, the top two in bytes 8-11. Byte 8 + i
    has those of scales i, i + 4, i + 8 and i + 12."""
    four = torch.cat(nibbles(quants, 96, 8), dim=1)  # [N, 16]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device).view(4, 1)
    two = (quants[:, None, 104:108] >> shifts & 3).view(-1, 16)
    scale = (four | (two << 4)).view(torch.int8) - 32
    # Bit p of byte i is the third bit of weight i of the p-th 32.
    places = torch.arange(8, dtype=torch.uint8, device=quants.device).view(8, 1)
    third = quants[:, None, 0:32] >> places & 1  # [N, 8, 32]
    weights = two_bits(quants, 32) | (third << 2).view(-1, 256)
    return scale, weights.view(torch.int8).view(-1, 16, 16) - 4


def two_bits(quants: Tensor, at: int) -> Tensor:
    """Unpack 256 pairs of bits from 64 bytes to uint8 [N, 256]: 32 bytes hold four runs of 32, in their bits 0-1, 2-3, 4-5 and
    6-7."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device).view(4, 1)
    return (quants[:, at : at + 64].view(-1, 2, 1, 32) >> shifts & 3).view(-1, 256)


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "FP8": _fp8,
}  # fmt: skip
