"""y = x · Wᵀ for up to 128 rows on tensor cores: W is the tall side of the product, K may be split over programs. `skinny`
chooses when to use it.

If N has too few tiles to fill the GPU, several programs share a tile's K. Each stores its partial sums in scratch memory and
increments a counter; the last to arrive adds all of them in a fixed order, so that results do not depend on which is last."""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.tall_tile import (
    MAX_SHARED_TILES,
    SCRATCH_NUMBERS,
    add_shares,
    finish,
    leave_share,
    scratch_of,
    sums_over,
)
from octavo.kernels.triton.runtime.chip import shared_bytes

MAX_ROWS = 128


class TileChoice(NamedTuple):
    block_n: int  # rows of W per program; with a gate, half of gate and half of up
    block_k: int
    split: int  # programs that share a tile's K
    num_warps: int
    num_stages: int  # tiles in flight


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(place, column):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines at these columns of the rows that place [BLOCK_N] points to into the L2 cache."""
    line = (place[:, None] + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_product(  # type: ignore[no-untyped-def]
    x,  # [M, K], rows x_stride apart
    weight,  # [PARTS · n, K]
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [PARTS · n] or None
    scales,  # [PARTS · n] float32 of weights in 8 bits, or None
    scratch,  # [tiles, SPLIT, PARTS, BLOCK_N, ROWS] float32, or None if SPLIT is 1
    arrivals,  # [tiles] int32, zero before and after the launch
    num_rows,
    n,
    x_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of each part
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,  # an activation's name, or ""
    PREFETCHED: tl.constexpr,  # cache lines of each row of W, prefetched before x is ready
    PDL: tl.constexpr,
    ASM: tl.constexpr,  # False: in the interpreter, which runs no assembly
):
    PARTS: tl.constexpr = 1 if GATED == "" else 2
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # weights in a cache line
    COUNT: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)  # tiles of K for each program
    HAS_TAIL: tl.constexpr = COUNT * SPLIT * BLOCK_K != K
    tile = tl.program_id(0)
    share = tl.program_id(1)
    first = tile * BLOCK_N
    # Rows of W beyond the last repeat the last one instead of a mask: their results are not stored.
    place = weight + first.to(tl.int64) * K + tl.minimum(tl.arange(0, BLOCK_N), n - 1 - first) * K
    part_stride = n.to(tl.int64) * K
    first_tile = share * COUNT
    if PDL:
        gdc_launch_dependents()
        for part in tl.static_range(PARTS):
            column = first_tile * BLOCK_K + tl.arange(0, PREFETCHED) * LINE
            prefetch(place + part * part_stride, tl.minimum(column, K - 1))
        gdc_wait()
    # Rows of x beyond the last repeat the last one too.
    row = tl.minimum(tl.arange(0, ROWS), num_rows - 1)
    sums, up_sums = sums_over(
        x, place, part_stride, row, x_stride, first_tile, K, COUNT, HAS_TAIL, ROWS, BLOCK_N, BLOCK_K, PARTS,
        ASM,
    )  # fmt: skip
    output = first + tl.arange(0, BLOCK_N)
    if SPLIT == 1:
        finish(sums, up_sums, out, residual, bias, None, scales, num_rows, n, output, tl.arange(0, ROWS), GATED)
    else:
        scratch += tile * (SPLIT * PARTS * BLOCK_N * ROWS)
        if leave_share(sums, up_sums, scratch, arrivals + tile, share, SPLIT, PARTS, BLOCK_N, ROWS):
            sums, up_sums = add_shares(scratch, arrivals + tile, SPLIT, PARTS, BLOCK_N, ROWS)
            finish(sums, up_sums, out, residual, bias, None, scales, num_rows, n, output, tl.arange(0, ROWS), GATED)


def stages_that_fit(choice: TileChoice, rows: int, item_bytes: int, weight_bytes: int, shared: int) -> int:
    """The number of tiles in flight for `shared` bytes of shared memory: num_stages on an H200, fewer on smaller GPUs.
    item_bytes and weight_bytes are those of a number of x and of W."""
    tile_bytes = (choice.block_n * weight_bytes + rows * item_bytes) * choice.block_k
    return max(2, min(choice.num_stages, shared // tile_bytes))


def tile_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: str,
    choice: TileChoice,
    pdl: bool,
    scales: torch.Tensor | None = None,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `skinny.few_rows_linear`."""
    num_rows, k = x.shape
    n = out.shape[1]
    assert num_rows <= MAX_ROWS and x.stride(1) == 1
    parts = 2 if gated else 1
    block_n = choice.block_n // parts
    rows = max(16, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(n, block_n)
    split = min(choice.split, triton.cdiv(k, choice.block_k))
    scratch, arrivals = None, None
    if split > 1:
        scratch, arrivals = scratch_of(x.device)
        assert num_tiles * split * choice.block_n * rows <= SCRATCH_NUMBERS and num_tiles <= MAX_SHARED_TILES
    # The columns that the pipeline loads first, or the program's whole share if that is less.
    stages = stages_that_fit(choice, rows, x.element_size(), weight.element_size(), shared_bytes(x.device))
    columns = min(choice.block_k * stages, triton.cdiv(k, split))
    options = {"launch_pdl": True} if pdl else {}
    _tile_product[(num_tiles, split)](
        x, weight, out, residual, bias, scales, scratch, arrivals, num_rows, n, x.stride(0),
        K=k, BLOCK_N=block_n, BLOCK_K=choice.block_k, SPLIT=split, ROWS=rows, GATED=gated,
        PREFETCHED=triton.next_power_of_2(triton.cdiv(columns * weight.element_size(), 128)), PDL=pdl, ASM=x.is_cuda,
        num_warps=choice.num_warps, num_stages=stages, **options,
    )  # fmt: skip
