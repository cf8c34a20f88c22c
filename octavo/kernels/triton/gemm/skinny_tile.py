"""y = x · Wᵀ for up to 128 rows on tensor cores: W is the tall side of the product, K may be split over programs. `skinny`
chooses when to use it.

If N has too few tiles to fill the GPU, several programs share a tile's K. Each stores its partial sums in scratch memory and
increments a counter; the last to arrive adds all of them in a fixed order, so that results do not depend on which is last."""

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation import activate
from octavo.kernels.triton.runtime.chip import shared_bytes

MAX_ROWS = 128
SCRATCH_NUMBERS = 1 << 22  # float32: 16 MiB per device
MAX_SHARED_TILES = 4096


class TileChoice(NamedTuple):
    block_n: int  # rows of W per program; with a gate, half of gate and half of up
    block_k: int
    split: int  # programs that share a tile's K
    num_warps: int
    num_stages: int  # tiles in flight


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(place, column, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines (64 numbers of two bytes) at these columns of W's rows into the L2 cache."""
    line = (place[:, None] + tl.minimum(column, K - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, place, part_stride, num_rows, x_stride, first_tile,
    K: tl.constexpr, COUNT: tl.constexpr, HAS_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, ROWS] of each part over COUNT tiles of K from first_tile on."""
    column = tl.arange(0, BLOCK_K)
    # Rows beyond the last repeat the last one: their columns of the result are not stored.
    row = tl.minimum(tl.arange(0, ROWS), num_rows - 1)
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for t in range(COUNT):
        at = (first_tile + t) * BLOCK_K + column
        weights = place[:, None] + at[None, :]
        inputs = x + row[None, :] * x_stride + at[:, None]
        if not HAS_TAIL:
            numbers = tl.load(inputs)
            tile = tl.load(weights)
            if PARTS == 2:
                up_tile = tl.load(weights + part_stride)
        else:
            numbers = tl.load(inputs, mask=(at < K)[:, None], other=0.0)
            tile = tl.load(weights, mask=(at < K)[None, :], other=0.0)
            if PARTS == 2:
                up_tile = tl.load(weights + part_stride, mask=(at < K)[None, :], other=0.0)
        sums = tl.dot(tile, numbers, sums, input_precision="ieee")
        if PARTS == 2:
            up_sums = tl.dot(up_tile, numbers, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    sums, up_sums, out, residual, bias, num_rows, n, first,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    output = first + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    if bias is not None:
        sums += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
        if GATED != "":
            up_sums += tl.load(bias + n + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
    if GATED != "":
        sums = activate(sums, GATED) * up_sums
    place = row[None, :] * n + output[:, None]
    mask = (output < n)[:, None] & (row < num_rows)[None, :]
    if residual is not None:
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_product(  # type: ignore[no-untyped-def]
    x,  # [M, K], rows x_stride apart
    weight,  # [PARTS · n, K]
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [PARTS · n] or None
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
):
    PARTS: tl.constexpr = 1 if GATED == "" else 2
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
            _prefetch(place + part * part_stride, first_tile * BLOCK_K + tl.arange(0, PREFETCHED) * 64, K)
        gdc_wait()
    sums, up_sums = _product(
        x, place, part_stride, num_rows, x_stride, first_tile, K, COUNT, HAS_TAIL, BLOCK_N, BLOCK_K, ROWS, PARTS
    )
    if SPLIT == 1:
        _store(sums, up_sums, out, residual, bias, num_rows, n, first, BLOCK_N, ROWS, GATED)
    else:
        cell = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        mine = scratch + (tile * SPLIT + share) * (PARTS * BLOCK_N * ROWS) + cell
        tl.store(mine, sums)
        if PARTS == 2:
            tl.store(mine + BLOCK_N * ROWS, up_sums)
        tl.debug_barrier()  # all threads' stores come before the one thread that counts this program
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.store(arrivals + tile, 0)  # ready for the next launch
            sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
            up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for other in range(SPLIT):
                theirs = scratch + (tile * SPLIT + other) * (PARTS * BLOCK_N * ROWS) + cell
                # .cg: the other programs' stores are in the L2 cache; this one's L1 cache may hold an older launch's.
                sums += tl.load(theirs, cache_modifier=".cg")
                if PARTS == 2:
                    up_sums += tl.load(theirs + BLOCK_N * ROWS, cache_modifier=".cg")
            _store(sums, up_sums, out, residual, bias, num_rows, n, first, BLOCK_N, ROWS, GATED)


@cache
def scratch_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and arrivals, shared by all launches on a device: they must run one after another, on one stream."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "run a product once before a capture"
    numbers = torch.empty(SCRATCH_NUMBERS, dtype=torch.float32, device=device)
    return numbers, torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


def stages_that_fit(choice: TileChoice, rows: int, item_bytes: int, shared: int) -> int:
    """The number of tiles in flight for `shared` bytes of shared memory: num_stages on an H200, fewer on smaller GPUs."""
    tile_bytes = (choice.block_n + rows) * choice.block_k * item_bytes
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
    stages = stages_that_fit(choice, rows, x.element_size(), shared_bytes(x.device))
    columns = min(choice.block_k * stages, triton.cdiv(k, split))
    options = {"launch_pdl": True} if pdl else {}
    _tile_product[(num_tiles, split)](
        x, weight, out, residual, bias, scratch, arrivals, num_rows, n, x.stride(0),
        K=k, BLOCK_N=block_n, BLOCK_K=choice.block_k, SPLIT=split, ROWS=rows, GATED=gated,
        PREFETCHED=triton.next_power_of_2(triton.cdiv(columns, 64)), PDL=pdl,
        num_warps=choice.num_warps, num_stages=stages, **options,
    )  # fmt: skip
