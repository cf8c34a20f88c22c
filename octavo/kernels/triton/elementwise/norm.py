"""RMSNorm of rows in one pass over memory."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

# A program holds whole rows: 65,536 numbers are 64 registers in each of 1,024 threads.
MAX_SIZE = 65536


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x,  # [T, D], rows x_stride apart
    weight,  # [D]
    out,  # [T, D] contiguous
    num_rows,
    x_stride,
    epsilon,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
):
    column = tl.arange(0, D_PADDED)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    numbers = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, axis=1) / D
    normed = numbers * tl.rsqrt(mean + epsilon)[:, None] * scale[None, :]
    place = column
    if IN_FRAGMENTS:
        # Of every 128 columns, 64 a + 16 b + 8 c + 2 d + e goes to 32 d + 8 b + 4 c + 2 a + e.
        place = column // 128 * 128 + column // 2 % 4 * 32 + column // 16 % 4 * 8
        place += column // 8 % 2 * 4 + column // 64 % 2 * 2 + column % 2
    tl.store(out + row[:, None] * D + place[None, :], normed.to(out.dtype.element_ty), mask=mask)


_launch_rms_norm = Launcher(_rms_norm)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor | None = None,
    *,
    is_fixed: bool = False,
    pdl: bool = False,
    in_fragments: bool = False,
) -> torch.Tensor:
    """RMSNorm: [T, D] → x / sqrt(mean(x²) + epsilon) * weight over the last dimension, in float32, rounded once.
    is_fixed: sum squares in the same order for any number of rows. in_fragments: the columns come in the order in which
    `int4_few` reads them."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert out.is_contiguous() and out.shape == x.shape
    num_rows, size = x.shape
    assert not in_fragments or size % 128 == 0
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape == (size,) and size <= MAX_SIZE
    if num_rows == 0:
        return out
    padded = 1 << (size - 1).bit_length()
    # Few rows: as many threads as possible on one row. Many: whole warps of 16-byte loads, about 4,096 numbers per program.
    has_few = is_fixed or num_rows <= 256
    rows = 1 if has_few else max(1, 4096 // padded)
    num_warps = min(32, max(1, rows * padded // (256 if has_few else 1024)))
    pdl = pdl and starts_early(x.device)
    _launch_rms_norm(
        (-(-num_rows // rows), 1, 1),
        (x, weight, out, num_rows, x.stride(0), epsilon),
        (size, padded, rows, pdl, in_fragments),
        {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps},
    )
    return out
