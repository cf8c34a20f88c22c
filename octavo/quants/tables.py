"""Decoders of the types whose codes index a table: the weight is a scale times the table's entry.
Each takes quants [N, bytes of a quant] uint8 and fills out [N, weights of a quant] float32.

The tables are part of the formats and cannot be derived."""

import functools

import torch
from torch import Tensor

from octavo.quants.blocks import Decoder, half, nibbles

# IQ4: 16 levels, closer together near zero.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# MXFP4: the numbers of 4-bit floats (sign, two bits of exponent, one of mantissa), doubled.
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_QUANTS_AT_ONCE = 4096  # IQ2_XXS quants decoded at once: the temporaries stay in the CPU caches
IQ2_WIDE_LEVELS = (8, 25, 43, 0, -8, -25, -43)
# IQ2_XXS: 256 points in eight dimensions. A point has 16 bits here, two per coordinate, the first coordinate lowest.
_IQ2_XXS_POINTS = """
0000 0002 0005 0008 000a 0011 0014 0020 0022 0028 002a 0041 0044 0050 0058 0061 0064 0080 0082 008a 00a2 0101
0104 0110 0115 0140 0184 0198 0200 0202 0222 0282 0401 0404 0410 0421 0424 0440 0442 0448 0460 0481 0484 0490
04a4 0500 0502 0508 0520 0546 0569 0580 0591 0609 0610 0640 0684 06a4 0800 0805 0808 0814 0828 0841 0844 0850
0852 0888 0904 0940 0a02 0a14 1001 1004 1010 1021 1040 1060 1084 1090 1095 1100 1108 1120 1150 115a 1180 1224
1245 1400 1408 1420 1425 1449 1480 1518 1562 1600 1616 1801 1804 1810 1840 1881 1900 1905 19a0 1a51 2000 2002
200a 2044 2061 2080 2082 2129 2148 2200 2202 2401 2404 2410 2440 2456 2500 2541 2564 2690 2808 2820 2894 2a44
4001 4004 4010 4018 4021 4024 4040 4048 4056 4060 4081 4084 4090 4100 4120 4161 4180 4185 4201 4210 4248 4256
4268 4400 4408 4420 4480 4499 4512 4524 4600 4801 4804 4810 4840 4845 4900 4958 4961 4982 4a45 4a90 5000 5008
5011 5019 5020 5080 5088 5104 5142 51a4 5291 5490 5492 550a 5601 5654 5800 5811 5819 5864 5940 5a08 6004 6010
6040 6068 6100 6155 6218 6260 6400 6405 6510 6512 6584 6842 8000 8002 800a 8041 8082 8104 8118 8140 8211 8401
8404 8410 8415 8440 8460 8500 8546 8594 8609 8640 8660 8802 8904 8a11 9004 9010 9024 9040 90a1 9116 9180 9245
9400 9422 9444 9551 9881 9920 a002 a050 a085 a109 a200 a418 a850 a904
"""


def levels(table: tuple[int, ...], codes: Tensor) -> Tensor:
    """Look up each code in the table: int8, in the shape of `codes`."""
    return torch.tensor(table, dtype=torch.int8, device=codes.device)[codes.int()]


def _iq4_nl(quants: Tensor, out: Tensor) -> None:
    low, high = nibbles(quants, 2, 16)
    torch.mul(levels(IQ4_LEVELS, torch.cat((low, high), dim=1)).float(), half(quants, 0), out=out)


def _iq4_xs(quants: Tensor, out: Tensor) -> None:
    # Eight scales of 6 bits: the low four bits are in bytes 4-7, the top two in bytes 2 and 3.
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=quants.device)
    top = (quants[:, 2:4, None] >> shifts & 3).view(-1, 8)
    low, high = nibbles(quants, 4, 4)
    scale = (torch.stack((low, high), dim=2).view(-1, 8) | (top << 4)).view(torch.int8) - 32
    first, second = (part.view(-1, 8, 16) for part in nibbles(quants, 8, 128))
    numbers = levels(IQ4_LEVELS, torch.cat((first, second), dim=2)).float()
    torch.mul(numbers, (scale.float() * half(quants, 0)).unsqueeze(2), out=out.view(-1, 8, 32))


def _mxfp4(quants: Tensor, out: Tensor) -> None:
    low, high = nibbles(quants, 1, 16)
    torch.mul(levels(FP4_LEVELS, torch.cat((low, high), dim=1)).float(), half_power(quants[:, :1]), out=out)


def half_power(exponents: Tensor) -> Tensor:
    """Convert exponents, uint8, to float32: 2 ** (e − 128), that is half of 2 ** (e − 127), because the levels are doubled. The
    two lowest results are subnormal."""
    wide = exponents.int()
    bits = torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23)
    return bits.view(torch.float32)


def _iq2_xxs(quants: Tensor, out: Tensor) -> None:
    scales, nibbles = iq2_xxs_nibbles(quants)
    _iq2(half(quants, 0), scales, nibbles, out)


def _iq2_wide(quants: Tensor, out: Tensor) -> None:
    _iq2(half(quants, 0), quants[:, 2:10].view(torch.int8), quants[:, 10:].reshape(-1, 8, 16), out)


def _iq2(outer: Tensor, scales: Tensor, nibbles: Tensor, out: Tensor) -> None:
    numbers = levels(IQ2_WIDE_LEVELS, torch.cat((nibbles & 15, nibbles >> 4), dim=2)).float()
    # 0.125 is a power of two: every product is exact, in any order.
    torch.mul(numbers, (scales.float() * outer).mul_(0.125).unsqueeze(2), out=out.view(-1, 8, 32))


def iq2_xxs_nibbles(quants: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales, int8 [N, 8], that multiply an eighth of the quant's own scale, and the coordinates as codes of
    IQ2_WIDE_LEVELS, uint8 [N, 8, 16]: the first 16 of each 32 are in the low nibbles.

    For each 32 weights, four bytes are the indices of four points. In the next 32 bits, the top four are the scale less a half,
    and the others hold, for each point, the signs of seven of its coordinates. The eighth sign makes the number of minus signs
    even."""
    points, signs = (table.to(quants.device) for table in _iq2_xxs_codes())
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=quants.device)
    scales = torch.empty(len(quants), 8, dtype=torch.int8, device=quants.device)
    nibbles = torch.empty(len(quants), 8, 2, dtype=torch.int64, device=quants.device)
    for start in range(0, len(quants), _QUANTS_AT_ONCE):
        some = slice(start, start + _QUANTS_AT_ONCE)
        words = quants[some, 2:].clone(memory_format=torch.contiguous_format).view(torch.int32).view(-1, 8, 2)
        named, bits = words[:, :, :1].contiguous().view(torch.uint8).int(), words[:, :, 1:]  # [N, 8, 4], [N, 8, 1]
        scales[some] = (bits[:, :, 0] >> 28 & 15) * 2 + 1
        codes = torch.index_select(points, 0, named.view(-1))
        codes |= torch.index_select(signs, 0, (bits >> shifts & 127).view(-1))
        codes = codes.view(-1, 8, 4)
        torch.bitwise_or(codes[:, :, :2], codes[:, :, 2:] << 4, out=nibbles[some])
    return scales, nibbles.view(torch.uint8)


@functools.cache
def _iq2_xxs_codes() -> tuple[Tensor, Tensor]:
    """Two int64 tables with one byte per coordinate: the levels of each point [256], and, for each pattern of seven sign bits,
    4 where the sign is minus [128]."""
    points = torch.tensor([int(word, 16) for word in _IQ2_XXS_POINTS.split()])
    sevens = torch.arange(128)[:, None] >> torch.arange(7) & 1  # [128, 7]
    minus = torch.cat((sevens, sevens.sum(dim=1, keepdim=True) % 2), dim=1)
    bytes_of = (points[:, None] >> torch.arange(0, 16, 2) & 3, minus * 4)
    point_codes, sign_codes = (table.to(torch.uint8).contiguous().view(torch.int64).view(-1) for table in bytes_of)
    return point_codes, sign_codes


DECODERS: dict[str, Decoder] = {
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ2_XXS": _iq2_xxs, "MXFP4": _mxfp4, "IQ2_WIDE": _iq2_wide,
}  # fmt: skip
