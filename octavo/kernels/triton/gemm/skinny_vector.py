"""y = x · Wᵀ for 1 to 8 rows: multiply-adds in float32; each program takes a few rows of W over the whole of K. `skinny`
chooses when to use it.

With one row the task is to keep enough bytes of W in flight. A program loads its first AHEAD tiles of W into registers at
once and, with programmatic dependent launch, before it waits for the kernel that makes x: no kernel writes W. The RMSNorm
factor is one number per row, so it is applied to the finished sums, in the same pass over x."""

# Triton supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation import activate

MAX_ROWS = 8
MAX_UNROLLED = 16  # tiles


class VectorChoice(NamedTuple):
    block_n: int  # rows of W per program; with a gate, half of gate and half of up
    num_warps: int  # side by side along K, 512 bytes each: with 16-byte loads a warp reads one segment of a row
    ahead: int  # tiles loaded before the first is used


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers, column, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers, with 0 for columns beyond K."""
    if K % BLOCK_K != 0:
        return tl.load(pointers, mask=column < K, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(pointers, eviction_policy=EVICT)


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(  # type: ignore[no-untyped-def]
    place, part_stride, norm, column, t, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr
):
    """Load tile t of what no kernel of the step writes: this program's rows of each part [BLOCK_N, BLOCK_K], then the norm's
    weight [BLOCK_K]."""
    at = t * BLOCK_K + column
    tiles = ()
    for part in tl.static_range(PARTS):
        tiles = tiles + (_load(place + part * part_stride + t * BLOCK_K, at[None, :], K, BLOCK_K, "evict_first"),)
    if norm is not None:
        tiles = tiles + (_load(norm + at, at, K, BLOCK_K, ""),)
    return tiles


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(  # type: ignore[no-untyped-def]
    x, num_rows, x_stride, column, t, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr
):
    """Load tile t of each row of x, [BLOCK_K] each. Rows beyond the last repeat the last one."""
    at = t * BLOCK_K + column
    rows = ()
    for row in tl.static_range(ROWS):
        if row == 0:
            rows = rows + (_load(x + at, at, K, BLOCK_K, ""),)
        else:
            rows = rows + (_load(x + tl.minimum(row, num_rows - 1) * x_stride + at, at, K, BLOCK_K, ""),)
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    sums, squares, tiles, rows,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Add one tile's products. One thread holds EACH neighbours of a row of W and adds them up at once."""
    new_sums = ()
    new_squares = ()
    for row in tl.static_range(ROWS):
        numbers = rows[row].to(tl.float32)
        if HAS_NORM:
            new_squares = new_squares + (
                squares[row] + tl.sum(tl.reshape(numbers * numbers, (BLOCK_K // EACH, EACH)), 1),
            )
            numbers = numbers * tiles[PARTS].to(tl.float32)
        for part in tl.static_range(PARTS):
            products = tiles[part].to(tl.float32) * numbers[None, :]
            partial = tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // EACH, EACH)), 2)
            new_sums = new_sums + (sums[row * PARTS + part] + partial,)
    return new_sums, new_squares


@triton.jit  # type: ignore[untyped-decorator]
def _sum_over_columns(  # type: ignore[no-untyped-def]
    tiles, x, place, part_stride, norm, num_rows, x_stride, column,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr,
    LOOPED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_N, BLOCK_K / EACH] of each row and part, and the sums of squares [BLOCK_K / EACH] of each row."""
    HAS_NORM: tl.constexpr = norm is not None
    HELD: tl.constexpr = PARTS + 1 if HAS_NORM else PARTS  # tensors of a tile of weights
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # More than two rows would take too many registers; their tiles are in the L1 cache by then.
    ROWS_AHEAD: tl.constexpr = AHEAD if ROWS <= 2 else 0
    rows = ()
    for t in tl.static_range(ROWS_AHEAD):
        rows = rows + _load_rows(x, num_rows, x_stride, column, t, K, BLOCK_K, ROWS)
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS * PARTS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K // EACH), tl.float32),)
    if HAS_NORM:
        for _ in tl.static_range(ROWS):
            squares = squares + (tl.zeros((BLOCK_K // EACH,), tl.float32),)

    for t in tl.range(LOOPED, num_stages=1):
        if ROWS_AHEAD == 0:
            current = _load_rows(x, num_rows, x_stride, column, t, K, BLOCK_K, ROWS)
        else:
            current = rows[:ROWS]
        sums, squares = _accumulate(sums, squares, tiles, current, BLOCK_N, BLOCK_K, EACH, ROWS, PARTS, HAS_NORM)
        tiles = tiles[HELD:] + _load_weights(place, part_stride, norm, column, t + AHEAD, K, BLOCK_K, PARTS)
        if ROWS_AHEAD > 0:
            rows = rows[ROWS:] + _load_rows(x, num_rows, x_stride, column, t + ROWS_AHEAD, K, BLOCK_K, ROWS)
    for t in tl.static_range(LOOPED, TILES):
        if ROWS_AHEAD == 0:
            current = _load_rows(x, num_rows, x_stride, column, t, K, BLOCK_K, ROWS)
        else:
            current = rows[:ROWS]
        sums, squares = _accumulate(sums, squares, tiles, current, BLOCK_N, BLOCK_K, EACH, ROWS, PARTS, HAS_NORM)
        tiles = tiles[HELD:]
        if t + AHEAD < TILES:
            tiles = tiles + _load_weights(place, part_stride, norm, column, t + AHEAD, K, BLOCK_K, PARTS)
        if ROWS_AHEAD > 0:
            rows = rows[ROWS:]
            if t + ROWS_AHEAD < TILES:
                rows = rows + _load_rows(x, num_rows, x_stride, column, t + ROWS_AHEAD, K, BLOCK_K, ROWS)
    return sums, squares


@triton.jit  # type: ignore[untyped-decorator]
def _vector_product(  # type: ignore[no-untyped-def]
    x,  # [M, K], rows x_stride apart
    weight,  # [PARTS · n, K]
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [PARTS · n] or None
    norm,  # [K] or None
    scales,  # [PARTS · n] float32 of weights in 8 bits, or None
    num_rows,
    n,
    x_stride,
    epsilon,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of each part
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    LOOPED: tl.constexpr,  # number of first tiles that run in a loop; the others are unrolled
    ROWS: tl.constexpr,
    GATED: tl.constexpr,  # an activation's name, or ""
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GATED == "" else 2
    EACH: tl.constexpr = 16 if weight.dtype.element_ty.primitive_bitwidth == 8 else 8
    first = tl.program_id(0) * BLOCK_N
    column = tl.arange(0, BLOCK_K)
    # Rows of W beyond the last repeat the last one instead of a mask: their results are not stored.
    local = tl.minimum(tl.arange(0, BLOCK_N), n - 1 - first)
    place = weight + first.to(tl.int64) * K + local[:, None] * K + column[None, :]
    part_stride = n.to(tl.int64) * K
    output = first + tl.arange(0, BLOCK_N)

    tiles = ()
    for t in tl.static_range(AHEAD):
        tiles = tiles + _load_weights(place, part_stride, norm, column, t, K, BLOCK_K, PARTS)
    by_output = ()  # the scales of weights in 8 bits, loaded early too: they come from memory, and are used last
    if scales is not None:
        for part in tl.static_range(PARTS):
            by_output = by_output + (tl.load(scales + part * n + output, mask=output < n, other=0.0),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    added = ()  # the residual, loaded now so that it is ready when the sums are
    for row in tl.static_range(ROWS):
        if residual is not None:
            mask = (output < n) & (row < num_rows)
            added = added + (tl.load(residual + row * n + output, mask=mask, other=0.0),)
    sums, squares = _sum_over_columns(
        tiles, x, place, part_stride, norm, num_rows, x_stride, column,
        K, BLOCK_N, BLOCK_K, EACH, AHEAD, LOOPED, ROWS, PARTS,
    )  # fmt: skip
    for row in tl.static_range(ROWS):
        factor = 1.0
        if norm is not None:
            factor = tl.rsqrt(tl.sum(squares[row], 0) / K + epsilon)
        y = tl.sum(sums[row * PARTS], 1) * factor
        if scales is not None:
            y *= by_output[0]  # type: ignore[misc]
        y = _biased(y, bias, output, n)
        if PARTS == 2:
            up = tl.sum(sums[row * PARTS + 1], 1) * factor
            if scales is not None:
                up *= by_output[1]  # type: ignore[misc]
            y = activate(y, GATED) * _biased(up, bias, n + output, 2 * n)
        if residual is not None:
            y += added[row].to(tl.float32)
        mask = (output < n) & (row < num_rows)
        tl.store(out + row * n + output, y.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _biased(y, bias, output, end):  # type: ignore[no-untyped-def]
    if bias is not None:
        y += tl.load(bias + output, mask=output < end, other=0.0).to(tl.float32)
    return y


def vector_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: str,
    choice: VectorChoice,
    pdl: bool,
    scales: torch.Tensor | None = None,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `skinny.few_rows_linear`."""
    num_rows, k = x.shape
    n = out.shape[1]
    assert num_rows <= MAX_ROWS and x.stride(1) == 1
    parts = 2 if gated else 1
    block_n = max(1, choice.block_n // parts)
    block_k = (512 if weight.element_size() == 1 else 256) * choice.num_warps
    num_tiles = triton.cdiv(k, block_k)
    ahead = min(choice.ahead, num_tiles)
    # With one row the tiles are unrolled: a loop would move its queue from register to register. With more rows they are
    # looped over: unrolled, ptxas spills registers.
    looped = 0 if num_rows == 1 and num_tiles <= MAX_UNROLLED else num_tiles - ahead
    scale, epsilon = norm if norm is not None else (None, 0.0)
    options = {"launch_pdl": True} if pdl else {}
    _vector_product[(triton.cdiv(n, block_n),)](
        x, weight, out, residual, bias, scale, scales, num_rows, n, x.stride(0), epsilon,
        K=k, BLOCK_N=block_n, BLOCK_K=block_k, AHEAD=ahead, LOOPED=looped,
        ROWS=triton.next_power_of_2(num_rows), GATED=gated, PDL=pdl, num_warps=choice.num_warps, **options,
    )  # fmt: skip
