"""Int4Tensor: a weight of 4-bit codes in groups, as it lies in GPU memory. weight = scale · (code − zero), exactly.

The weight is cut into blocks of 64 outputs and 128 columns of K, each 1024 words of eight codes. A block is stored in the
order in which the threads of four warps hold it as the left operand of a matrix instruction: warp w has outputs 16 w … 16 w
+ 15, its lane (g, q) has outputs g and g + 8, and of every 16 columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. A thread reads 16
bytes: 32 codes of one output. Two neighbouring columns are the same nibble of a word's two halves, so that one AND makes
two codes a pair of 16-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OUTPUTS, COLUMNS = 64, 128  # of a block
WORDS = OUTPUTS * COLUMNS // 8
GROUPS = (32, 64, 128)  # columns that may share a scale
_AT_ONCE = 1 << 24  # codes packed together: bounds the temporaries


@dataclass(frozen=True, slots=True)
class Int4Tensor:
    codes: Tensor  # [N / 64, K / 128, 1024] int32
    scales: Tensor  # [N / 64, K / 128, 128 / group, 64] int32: a scale in float16, and in the upper half 1024 + zero (float16)
    # or 128 + zero (bfloat16) in the type of the products
    num_outputs: int
    num_columns: int
    group_size: int
    is_interleaved: bool  # a block has 32 outputs of gate and the same 32 of up: eight of one, then eight of the other
    dtype: torch.dtype  # of x and of the result

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def subgroups(self) -> int:
        return COLUMNS // self.group_size


def make_room(
    num_outputs: int,
    num_columns: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    is_interleaved: bool = False,
) -> Int4Tensor:
    """A weight of zeros, to be filled by store(). Outputs beyond the last and columns beyond the last are zeros."""
    assert group_size in GROUPS and num_columns % group_size == 0 and dtype in (torch.float16, torch.bfloat16)
    assert not is_interleaved or num_outputs % OUTPUTS == 0
    blocks = -(-num_outputs // OUTPUTS), -(-num_columns // COLUMNS)
    codes = torch.zeros((*blocks, WORDS), dtype=torch.int32, device=device)
    magic = _magic(dtype)
    scales = torch.full((*blocks, COLUMNS // group_size, OUTPUTS), magic << 16, dtype=torch.int32, device=device)
    return Int4Tensor(codes, scales, num_outputs, num_columns, group_size, is_interleaved, dtype)


def store(weight: Int4Tensor, first: int, codes: Tensor, zeros: Tensor, scales: Tensor) -> None:
    """Fill outputs first … first + n − 1. codes [n, K] uint8 below 16, zeros [n, K / group] below 128, scales [n, K / group] of
    which float16 holds every value."""
    step = max(1, _AT_ONCE // weight.num_columns)
    for start in range(0, len(codes), step):
        some = slice(start, start + step)
        outputs = torch.arange(first + start, first + start + len(codes[some]), device=weight.codes.device)
        _store(weight, outputs, codes[some], zeros[some], scales[some])


def _store(weight: Int4Tensor, outputs: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> None:
    num_rows, width = codes.shape
    num_blocks = weight.codes.shape[1]
    padded = codes.new_zeros(num_rows, num_blocks * COLUMNS)
    padded[:, :width] = codes
    # Columns of a block: [shi 2, j 4, k8 2, q 4, e 2]; column = 64 shi + 16 j + 8 k8 + 2 q + e.
    parts = padded.view(num_rows, num_blocks, 2, 4, 2, 4, 2).to(torch.int32)
    # [n, B, q, k8, shi, e, j]: word v = 2 k8 + shi of lane q; nibble j of half e.
    parts = parts.permute(0, 1, 5, 4, 2, 6, 3).reshape(num_rows, num_blocks, 16, 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    words = (parts << shifts).sum(dim=-1, dtype=torch.int32)  # [n, B, 16]: q, then v
    block, place = _place(weight, outputs)
    # A block's words: [warp and half 8, g 8, q 4, v 4].
    weight.codes.view(-1, num_blocks, 8, 8, 16)[block, :, place // 8, place % 8] = words
    bits = scales.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
    bits |= (zeros.to(torch.int32) + _magic(weight.dtype)) << 16
    full = torch.full(
        (num_rows, num_blocks * weight.subgroups), _magic(weight.dtype) << 16, dtype=torch.int32, device=codes.device
    )
    full[:, : bits.shape[1]] = bits
    weight.scales[block, :, :, place] = full.view(num_rows, num_blocks, weight.subgroups)


def _place(weight: Int4Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Each output's block, and its row in there."""
    if not weight.is_interleaved:
        return outputs // OUTPUTS, outputs % OUTPUTS
    half = weight.num_outputs // 2
    within, part = outputs % half, outputs // half
    row = within % 32
    return within // 32, row // 8 * 16 + part * 8 + row % 8


def _magic(dtype: torch.dtype) -> int:
    """The bits of 1024 in float16 or of 128 in bfloat16: a code below 16 added to these bits is added to the number."""
    return 0x6400 if dtype == torch.float16 else 0x4300


def decode(weight: Int4Tensor) -> Tensor:
    """[N, K] float32, in plain torch: the reference, and what other devices multiply with."""
    outputs = torch.arange(weight.num_outputs, device=weight.codes.device)
    block, place = _place(weight, outputs)
    num_blocks = weight.codes.shape[1]
    words = weight.codes.view(-1, num_blocks, 8, 8, 16)[block, :, place // 8, place % 8]  # [N, B, 16]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    parts = (words.unsqueeze(-1) >> shifts & 15).view(-1, num_blocks, 4, 2, 2, 2, 4)  # q, k8, shi, e, j
    codes = parts.permute(0, 1, 4, 6, 3, 2, 5).reshape(len(outputs), num_blocks * weight.subgroups, weight.group_size)
    meta = weight.scales[block, :, :, place].reshape(len(outputs), -1, 1)
    scales = (meta & 0xFFFF).to(torch.int16).view(torch.float16).float()
    zeros = (meta >> 16 & 0xFF).float()
    return (scales * (codes.float() - zeros)).flatten(1)[:, : weight.num_columns]
