"""Decode 4-bit weights (`int4_layout`) to 16 bits, for products with so many rows that torch's product outweighs the decoding."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.gemm.int4_layout import Int4Tensor
from octavo.kernels.triton.runtime.launch import Launcher


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    codes,  # [N / 64, BLOCKS, 1024] int32
    scales,  # [N / 64, BLOCKS, SUB, 64] int32
    out,  # [n, K]
    n,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUB: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One block of 64 outputs and 128 columns."""
    block = tl.program_id(0)
    across = tl.program_id(1)
    number = across.to(tl.int64) * BLOCKS + block
    row = tl.arange(0, 64)
    column = tl.arange(0, 128)
    word = (row // 8 * 128 + row % 8 * 16)[:, None] + (column // 2 % 4 * 4 + column // 8 % 2 * 2 + column // 64)[
        None, :
    ]
    words = tl.load(codes + number * 1024 + word)
    code = (words >> (column % 2 * 16 + column // 16 % 4 * 4)[None, :]) & 15
    meta = tl.load(scales + number * (SUB * 64) + (column // (128 // SUB) * 64)[None, :] + row[:, None])
    scale = (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    number_of = (code - ((meta >> 16) & 0xFF)).to(tl.float32) * scale
    output = across * 64 + row
    if INTERLEAVED:
        output = across * 32 + row // 16 * 8 + row % 8 + row // 8 % 2 * (n // 2)
    at = block * 128 + column
    mask = (output < n)[:, None] & (at < K)[None, :]
    tl.store(out + output.to(tl.int64)[:, None] * K + at[None, :], number_of.to(out.dtype.element_ty), mask=mask)


_launch_decode = Launcher(_decode)


def decoded(weight: Int4Tensor) -> torch.Tensor:
    """[N, K] in the type of the products, rounded once."""
    shape = weight.num_outputs, weight.num_columns
    out = torch.empty(shape, dtype=weight.dtype, device=weight.codes.device)
    across, blocks = weight.codes.shape[:2]
    _launch_decode(
        (blocks, across, 1),
        (weight.codes, weight.scales, out, weight.num_outputs),
        (weight.num_columns, blocks, weight.subgroups, weight.is_interleaved),
        {"num_warps": 4},
    )
    return out
