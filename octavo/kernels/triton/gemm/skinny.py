"""y = x · Wᵀ for few rows (a skinny product), where the time is that of reading W. Chooses a kernel and its tiles by shape.
Norm, bias, gate and residual are fused because each would cost a launch."""

from functools import cache

import torch

from octavo.errors import ConfigError
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm.skinny_tile import MAX_ROWS, TileChoice, tile_product
from octavo.kernels.triton.gemm.skinny_vector import VectorChoice, vector_product
from octavo.kernels.triton.gemm.stream import StreamChoice, can_run
from octavo.kernels.triton.gemm.stream import choose_fp8 as choose_stream
from octavo.kernels.triton.gemm.tall_tile import SCRATCH_NUMBERS
from octavo.kernels.triton.runtime.batch_sizes import captured_size
from octavo.kernels.triton.runtime.chip import starts_early

# With more rows, multiply-adds outside the tensor cores take longer than reading W.
VECTOR_ROWS = 4
_HEAD_ROWS = 1 << 16  # a weight with as many rows (an LM head) fills the GPU many times over
_SMALL = 1 << 24  # numbers


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: str | None = None,
    pdl: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K], weight [N, K] → [M, N], summed in float32 and rounded once. M is at most 128.

    scales [N] float32: of a weight in 8-bit floats; x keeps its 16 bits.
    norm: (weight [K], epsilon) of an RMSNorm of x before the product. residual [M, N]: the product is added to it in place,
    and it is returned. gated: the weight holds the rows of gate, then those of up; the result [M, N/2] is the named
    activation of gate, times up. pdl: start reading the weight before the previous kernel has ended."""
    num_rows, k = x.shape
    width = weight.shape[0]
    if gated is not None and gated not in ACTIVATIONS:
        raise ConfigError(f"activation {gated!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")
    n = width // 2 if gated else width
    assert num_rows <= MAX_ROWS and x.stride(1) == 1
    assert weight.is_contiguous() and weight.shape[1] == k and (x.dtype == weight.dtype) == (scales is None)
    assert gated is None or width == 2 * n
    if residual is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    else:
        assert residual.is_contiguous() and residual.shape == (num_rows, n)
        out = residual
    if num_rows == 0:
        return out
    pdl = pdl and starts_early(x.device)
    choice: StreamChoice | VectorChoice | TileChoice | None = None
    if scales is not None:
        choice = streamed(num_rows, width, k, x.device)
    if choice is None:
        rule = choose if scales is None else choose_fp8
        choice = rule(num_rows, n, k, gated is not None, num_processors(x.device))
    if isinstance(choice, StreamChoice):
        from octavo.kernels.triton.gemm.fp8_stream import fp8_stream  # needs Gluon

        assert scales is not None
        if norm is not None:
            x = rms_norm(x, *norm, pdl=pdl)
        if x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous()
        fp8_stream(x, weight, scales, out, residual, bias, gated or "", choice, num_processors(x.device), pdl)
    elif isinstance(choice, VectorChoice):
        vector_product(x, weight, out, residual, bias, norm, gated or "", choice, pdl, scales)
    else:
        if norm is not None:
            x = rms_norm(x, *norm, pdl=pdl)
        tile_product(x, weight, out, residual, bias, gated or "", choice, pdl, scales)
    return out


def pays(num_rows: int, n: int, k: int, is_gated: bool = False) -> bool:
    """Whether `few_rows_linear` beats torch's product with weight [n, k] and the other launches that this needs, as measured
    by `benchmarks/kernels/few_rows.py` on an H200 for the shapes of 0.6B and 8B models."""
    num_rows = captured_size(num_rows)
    if num_rows == 1:
        return True
    if n >= _HEAD_ROWS:
        return num_rows <= 64
    # cuBLAS is furthest from the memory bandwidth for small weights: it has too few tiles to fill the GPU.
    if n * k <= _SMALL:
        return num_rows <= 32
    return is_gated and 4 < num_rows <= MAX_ROWS


@cache
def choose(num_rows: int, n: int, k: int, is_gated: bool, num_processors: int) -> VectorChoice | TileChoice:
    """The kernel and its tiles for weight [n, k], or [2 n, k] if gated: the fastest measured for such a shape."""
    num_rows = captured_size(num_rows)
    is_tiny = n * k <= _SMALL // 2
    if num_rows == 1 or (num_rows == 2 and n < _HEAD_ROWS) or (num_rows <= VECTOR_ROWS and is_tiny):
        return choose_vector(num_rows, k)
    if is_gated and n * k <= _SMALL and num_rows <= 32:
        return TileChoice(128, 64, 4, 4, 6) if num_rows <= 16 else TileChoice(32, 256, 1, 4, 4)
    return choose_tile(num_rows, n, k, is_gated, num_processors)


def choose_vector(num_rows: int, k: int) -> VectorChoice:
    # Arguments: rows of W, warps, tiles ahead. Short rows are held completely.
    if k <= 512:
        return VectorChoice(8, max(1, (k + 255) // 256), 1)
    if num_rows == 1:
        return VectorChoice(8, 8, 2) if k > 8192 else VectorChoice(4, 4, 4)
    if k <= 1024:
        return VectorChoice(4, 1, 2 if num_rows == 2 else 3)
    return VectorChoice(4, 4, 2)


def choose_tile(num_rows: int, n: int, k: int, is_gated: bool, num_processors: int) -> TileChoice:
    # wgmma takes 64 rows of W; gate and up are one such tile each.
    block_n = 128 if is_gated else 64
    block_k = 128 if num_rows <= 32 else 64
    num_tiles = -(-n // 64)
    split = 1
    # Shares of less than two tiles of K cost more than they gain, and partial sums are not free with many rows.
    limit = min(8, k // (2 * block_k), max(1, k // (8 * max(16, num_rows))))
    while num_tiles * split < num_processors and split * 2 <= limit:
        split *= 2
    padded = max(16, 1 << (num_rows - 1).bit_length())
    while split > 1 and num_tiles * split * block_n * padded > SCRATCH_NUMBERS:
        split //= 2
    return TileChoice(block_n, block_k, split, 4, 6 if num_rows > 64 else 4)


def pays_fp8(num_rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `few_rows_linear` with a weight [n, k] in 8 bits beats torch's 8-bit product and the launches before and after it,
    as measured by `benchmarks/kernels/packed.py` on an H200 for the shapes of an 8B model."""
    if streamed(num_rows, n, k, device) is not None:
        return True
    num_rows = captured_size(num_rows)
    # A weight with few outputs leaves torch's product too few tiles; with more rows than these, reading x costs more.
    return num_rows <= 2 or (num_rows <= 64 and n <= 4096)


def streamed(num_rows: int, n: int, k: int, device: torch.device) -> StreamChoice | None:
    """The tiles of `fp8_stream` for a weight [n, k] in 8 bits, where that is the fastest."""
    return choose_stream(num_rows, n, k, num_processors(device)) if can_run(device) else None


@cache
def choose_fp8(num_rows: int, n: int, k: int, is_gated: bool, num_processors: int) -> VectorChoice | TileChoice:
    """choose() for a weight in 8 bits that `fp8_stream` does not take."""
    num_rows = captured_size(num_rows)
    if k <= 512 and num_rows <= VECTOR_ROWS:
        return VectorChoice(8, 1, 1)
    if num_rows == 1:
        if is_gated:
            return VectorChoice(8, 4, 2)
        if k > 8192:
            return VectorChoice(4, 2, 2)
        return VectorChoice(8, 2, 1) if n >= 6144 else VectorChoice(8, 4, 1)
    if num_rows == 2:
        return VectorChoice(4, 2, 1) if is_gated or n > 4096 else VectorChoice(8, 4, 1)
    if num_rows <= VECTOR_ROWS and k <= 4096 and not is_gated:
        return VectorChoice(4, 2, 1)
    choice = choose_tile(num_rows, n, k, is_gated, num_processors)._replace(block_k=128, num_stages=4)
    # Half of the bytes are read in half of the time, unless twice as many programs read.
    wide = choice._replace(split=choice.split * 2)
    has_room = -(-n // 64) * wide.split * wide.block_n * max(16, num_rows) <= SCRATCH_NUMBERS
    return wide if num_rows <= 32 and 1 < wide.split <= k // 256 and has_room else choice


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. For the interpreter, which runs programs one by one, any number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
