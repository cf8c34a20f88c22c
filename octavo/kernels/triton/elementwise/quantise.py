"""Round rows to 8-bit floats with one scale each, alone, after an RMSNorm or after a gate, in one pass over memory."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation import ACTIVATIONS, activate
from octavo.kernels.triton.runtime.launch import Launcher

# A program holds whole rows: 65,536 numbers are 64 registers in each of 1,024 threads.
MAX_SIZE = 65536


def has_fp8(device: torch.device) -> bool:
    """Whether this GPU can multiply 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x,  # [T, D], rows x_stride apart; with a gate [T, 2 D]
    norm,  # [D] or None
    out,  # [T, D] float8, contiguous
    scales,  # [T] float32
    num_rows,
    x_stride,
    epsilon,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,  # an activation's name, or ""
):
    column = tl.arange(0, D_PADDED)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    place = x + row[:, None] * x_stride + column[None, :]
    numbers = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if GATE != "":
        numbers = activate(numbers, GATE) * tl.load(place + D, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        weight = tl.load(norm + column, mask=column < D, other=0.0).to(tl.float32)
        mean = tl.sum(numbers * numbers, axis=1) / D
        numbers = numbers * tl.rsqrt(mean + epsilon)[:, None] * weight[None, :]
    # At least 1e-12, so that a row of zeros does not divide by 0; 448 is the largest number of the type.
    largest = tl.maximum(tl.max(tl.abs(numbers), axis=1), 1e-12)
    rounded = (numbers * (448.0 / largest)[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * D + column[None, :], rounded, mask=mask)
    tl.store(scales + row, largest / 448.0, mask=row < num_rows)


_launch_quantise = Launcher(_quantise)


def quantise_rows(x: torch.Tensor, *, is_fixed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D] → float8 [T, D] and scales [T, 1] float32, whose product approximates x; each row's largest becomes 448.
    is_fixed: a row's numbers do not depend on the number of rows."""
    return _launch(x, x.shape[1], None, 0.0, "", is_fixed)


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, is_fixed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantise_rows of x / sqrt(mean(x²) + epsilon) * weight, without rounding in between."""
    assert weight.is_contiguous() and weight.shape == x.shape[1:]
    return _launch(x, x.shape[1], weight, epsilon, "", is_fixed)


def silu_mul_fp8(
    gate_up: torch.Tensor, name: str = "silu", *, is_fixed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 2 D] → quantise_rows of the named activation of the first half, times the second half, without rounding in
    between."""
    assert name in ACTIVATIONS and gate_up.shape[1] % 2 == 0
    return _launch(gate_up, gate_up.shape[1] // 2, None, 0.0, name, is_fixed)


def _launch(
    x: torch.Tensor, size: int, norm: torch.Tensor | None, epsilon: float, gate: str, is_fixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = x.shape[0]
    assert x.stride(1) == 1 and size <= MAX_SIZE
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, scales
    padded = triton.next_power_of_2(size)
    # As in norm.py. Few rows: as many threads as possible on one row. Many: about 4,096 numbers per program.
    has_few = is_fixed or num_rows <= 256
    rows = 1 if has_few else max(1, 4096 // padded)
    num_warps = min(16, max(1, rows * padded // (256 if has_few else 1024)))
    _launch_quantise(
        (-(-num_rows // rows), 1, 1),
        (x, norm, out, scales, num_rows, x.stride(0), epsilon),
        (size, padded, rows, gate),
        {"num_warps": num_warps},
    )
    return out, scales
