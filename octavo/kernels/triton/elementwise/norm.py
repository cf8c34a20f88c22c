"""RMSNorm of rows, alone or after adding a product to the residual stream, in one pass over memory."""

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
    residual,  # [T, D] contiguous, updated, or None
    weight,  # [D]
    out,  # [T, D] contiguous
    num_rows,
    x_stride,
    epsilon,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, D_PADDED)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    numbers = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    place = row[:, None] * D + column[None, :]
    if residual is not None:
        numbers += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        # Rounded before the norm, so that the result equals an addition followed by a norm.
        total = numbers.to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        numbers = total.to(tl.float32)
    mean = tl.sum(numbers * numbers, axis=1) / D
    normed = numbers * tl.rsqrt(mean + epsilon)[:, None] * scale[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)


_launch_rms_norm = Launcher(_rms_norm)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor | None = None,
    *,
    is_fixed: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """RMSNorm: [T, D] → x / sqrt(mean(x²) + epsilon) * weight over the last dimension, in float32, rounded once.
    is_fixed: sum squares in the same order for any number of rows."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert out.is_contiguous() and out.shape == x.shape
    _launch(x, None, weight, epsilon, out, pdl, is_fixed)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, pdl: bool = False
) -> torch.Tensor:
    """residual += x in place; returns the norm of the sum. For ranks whose products are added up before the residual."""
    assert residual.is_contiguous() and residual.shape == x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, weight, epsilon, out, pdl)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    pdl: bool,
    is_fixed: bool = False,
) -> None:
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape == (size,) and size <= MAX_SIZE
    if num_rows == 0:
        return
    padded = 1 << (size - 1).bit_length()
    # Few rows: as many threads as possible on one row. Many: whole warps of 16-byte loads, about 4,096 numbers per program.
    has_few = is_fixed or num_rows <= 256
    rows = 1 if has_few else max(1, 4096 // padded)
    num_warps = min(32, max(1, rows * padded // (256 if has_few else 1024)))
    pdl = pdl and starts_early(x.device)
    _launch_rms_norm(
        (-(-num_rows // rows), 1, 1),
        (x, residual, weight, out, num_rows, x.stride(0), epsilon),
        (size, padded, rows, pdl),
        {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps},
    )
