"""MXFP4 weights of experts as they lie in GPU memory for `mxfp4_hopper`. weight = number · 2 ** (scale − 127), exactly, of 4-bit floats.

Each expert's weight is cut into blocks of 64 outputs and 128 columns of K, in the order in which the threads of four warps
hold it as the left operand of a matrix instruction (`gemm/int4_layout.py` describes it). Of a word's eight numbers, each two
neighbouring columns are the same bits of its halves. A number's four bits lie as bfloat16 has its sign, the lower two bits
of its exponent and its first bit of mantissa, rotated differently for each of the four pairs, so that one AND after a
rotation makes two of them bfloat16; only the last pair takes two. What is missing is a power of two, which comes with the
scale: a scale is held as the exponent of bfloat16 that is 2 ** −LOWERED times too low."""

from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUTS, COLUMNS = 64, 128  # of a block
WORDS = OUTPUTS * COLUMNS // 8
GROUP = 32  # columns that share a scale
LOWERED = 32  # sums are so many powers of two too low: then no scale up to 2 ** 33 is beyond bfloat16
_BIAS = 126 - LOWERED  # of a held exponent over the scale's own

# Bits of a pair of columns in a word, and by how much they are rotated to the left.
ROTATIONS = (
    ((0x81C081C0, 0),), ((0x81C081C0, 4),), ((0x81C081C0, 10),), ((0x00400040, 14), (0x81808180, 6)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Weights [E, N, K]."""

    words: Tensor  # [E, N / 64, K / 128, 1024] int32
    exponents: Tensor  # [E, N / 64, K / 128, 64] int32: a byte for each 32 columns of an output
    num_outputs: int
    num_columns: int
    is_interleaved: bool  # a block has 32 outputs of gate and the same 32 of up: eight of one, then eight of the other

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.exponents.nbytes


def make_room(
    num_experts: int, num_outputs: int, num_columns: int, device: torch.device, is_interleaved: bool
) -> Mxfp4Tensor:
    """Weights of zeros, to be filled by store(). Outputs beyond the last and columns beyond the last are zeros."""
    assert num_columns % GROUP == 0 and (not is_interleaved or num_outputs % OUTPUTS == 0)
    blocks = num_experts, -(-num_outputs // OUTPUTS), -(-num_columns // COLUMNS)
    words = torch.zeros((*blocks, WORDS), dtype=torch.int32, device=device)
    exponents = torch.zeros((*blocks, OUTPUTS), dtype=torch.int32, device=device)
    return Mxfp4Tensor(words, exponents, num_outputs, num_columns, is_interleaved)


def store(weight: Mxfp4Tensor, expert: int, first: int, codes: Tensor, scales: Tensor) -> None:
    """Fill outputs first … first + n − 1 of an expert. codes [n, K / 2] uint8: 16 bytes have 32 columns, the first 16 in their
    low halves; scales [n, K / 32] uint8."""
    num_rows, num_blocks = len(codes), weight.words.shape[2]
    both = codes.view(num_rows, -1, 1, GROUP // 2)
    flat = torch.cat((both & 15, both >> 4), dim=2).view(num_rows, -1)
    padded = flat.new_zeros(num_rows, num_blocks * COLUMNS)
    padded[:, : flat.shape[1]] = flat
    outputs = torch.arange(first, first + num_rows, device=codes.device)
    block, place = _place(weight, outputs)
    # A block's words: [warp and half 8, g 8, q 4, v 4].
    weight.words[expert].view(-1, num_blocks, 8, 8, 16)[block, :, place // 8, place % 8] = _words(padded, num_blocks)
    held = scales.to(torch.int32) + _BIAS
    held = torch.where(scales == 255, 255, held.clamp_(max=254))  # 255 is not a number
    full = held.new_zeros(num_rows, num_blocks * COLUMNS // GROUP)
    full[:, : held.shape[1]] = held
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=codes.device)
    packed = (full.view(num_rows, num_blocks, 4) << shifts).sum(dim=-1, dtype=torch.int32)
    weight.exponents[expert][block, :, place] = packed


def _words(numbers: Tensor, num_blocks: int) -> Tensor:
    """[n, B, 16] words of 4-bit numbers [n, B · 128]."""
    bits = numbers.to(torch.int64)
    bits = (bits & 8) << 12 | (bits & 7) << 6  # as bfloat16's
    # Columns of a block: [shi 2, j 4, k8 2, q 4, e 2]; column = 64 shi + 16 j + 8 k8 + 2 q + e.
    pairs = bits.view(len(bits), num_blocks, 2, 4, 2, 4, 2)
    pairs = pairs[..., 0] | pairs[..., 1] << 16  # [n, B, shi, j, k8, q]
    words = torch.zeros_like(pairs[:, :, :, 0])
    for j, parts in enumerate(ROTATIONS):
        for mask, left in parts:
            part = pairs[:, :, :, j] & mask
            words |= (part << left | part >> (32 - left)) & 0xFFFFFFFF
    # [n, B, q, k8, shi]: word v = 2 k8 + shi of lane q.
    return words.permute(0, 1, 4, 3, 2).reshape(len(bits), num_blocks, 16).to(torch.int32)


def _place(weight: Mxfp4Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Each output's block, and its row in there."""
    if not weight.is_interleaved:
        return outputs // OUTPUTS, outputs % OUTPUTS
    half = weight.num_outputs // 2
    within, part = outputs % half, outputs // half
    row = within % 32
    return within // 32, row // 8 * 16 + part * 8 + row % 8


def decode(weight: Mxfp4Tensor, expert: int) -> Tensor:
    """[N, K] float32 of one expert, in plain torch: the reference."""
    outputs = torch.arange(weight.num_outputs, device=weight.words.device)
    block, place = _place(weight, outputs)
    num_rows, num_blocks = len(outputs), weight.words.shape[2]
    words = weight.words[expert].view(-1, num_blocks, 8, 8, 16)[block, :, place // 8, place % 8]
    words = words.to(torch.int64) & 0xFFFFFFFF
    pairs = []
    for parts in ROTATIONS:
        pair = torch.zeros_like(words)
        for mask, left in parts:
            pair |= ((words >> left | words << (32 - left)) & 0xFFFFFFFF) & mask
        pairs.append(torch.stack((pair & 0xFFFF, pair >> 16), dim=-1))
    bits = torch.stack(pairs, dim=3).view(num_rows, num_blocks, 4, 2, 2, 4, 2)  # q, k8, shi, j, e
    bits = bits.permute(0, 1, 4, 5, 3, 2, 6).reshape(num_rows, num_blocks * COLUMNS)
    plain = (bits << 16).to(torch.int32).view(torch.float32).double() * 2.0**126
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    held = (weight.exponents[expert][block, :, place].unsqueeze(-1) >> shifts & 255).reshape(num_rows, -1)
    powers = torch.exp2(held.double() - _BIAS - 127).repeat_interleave(GROUP, dim=1)
    return (plain * powers).float()[:, : weight.num_columns]
