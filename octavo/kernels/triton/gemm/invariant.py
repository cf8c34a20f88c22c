"""y = x · Wᵀ whose bits for a row do not depend on the other rows or their number: one order of sums for all batches.
Norm, bias, gate, residual and 8-bit scales are fused, as in `skinny`.

W is the tall side of every tile, so all row counts use the same matrix instruction and differ only in its width, which does
not change the order of a sum: along K, sixteen numbers at a time. If N has too few tiles to fill the GPU, K is divided into
shares, depending on N and K only. Shares are summed separately and added up in order: by several programs if rows are few, by
one program, share after share, if they are many. Both give the same bits."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.errors import ConfigError
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS
from octavo.kernels.triton.elementwise.norm import rms_norm
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
from octavo.kernels.triton.runtime.launch import Launcher

_PROGRAMS = 132  # multiprocessors of an H200: about as many shares of a weight keep it reading
_MIN_SHARE, _MAX_SHARES = 256, 8
_GRAIN = 128  # columns; shares are multiples of it for all tiles
_TOGETHER = 8  # consecutive tiles of x, so that W's tiles stay in the cache


class Tile(NamedTuple):
    """How a product is tiled. Changes only speed."""

    rows: int  # of x
    block_n: int  # rows of W; with a gate, of gate and of up each
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, is_gated: bool) -> Tile:
    """Few rows: the tile that keeps the most reads of W in flight. Many: the one that reads least per product."""
    for rows in (16, 32, 64):
        if num_rows <= rows:
            return Tile(rows, 64, 128 if rows <= 32 else 64, 4, 4)
    if num_rows <= 128:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 64, 64, 8, 3) if is_gated else Tile(128, 128, 64, 8, 3)


@cache
def num_shares(n: int, k: int) -> int:
    """The number of shares of K: by the weight's shape alone, never by the rows."""
    tiles, shares = -(-n // 64), 1
    while tiles * shares < _PROGRAMS and shares < _MAX_SHARES and k // (2 * shares) >= _MIN_SHARE:
        shares *= 2
    return shares


def share_size(k: int, shares: int) -> int:
    return -(-k // (shares * _GRAIN)) * _GRAIN


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _product(  # type: ignore[no-untyped-def]
    x,  # [M, K], rows x_stride apart
    weight,  # [PARTS · n, K]
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [PARTS · n] or None
    row_scales,  # [M] float32 of an 8-bit product, or None
    output_scales,  # [n] float32
    scratch,  # [tiles, SHARES, PARTS, BLOCK_N, ROWS] float32, or None: one program computes all shares of its tile
    arrivals,  # [tiles] int32, zero before and after the launch
    num_rows,
    num_blocks,  # tiles of x
    n,
    x_stride,
    K: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of each part
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # consecutive tiles of x
    GATED: tl.constexpr,  # an activation's name, or ""
):
    PARTS: tl.constexpr = 1 if GATED == "" else 2
    COUNT: tl.constexpr = SHARE // BLOCK_K  # tiles of K in a share
    HAS_TAIL: tl.constexpr = SHARES * SHARE != K
    tl.static_assert(SHARE % BLOCK_K == 0)
    number = tl.program_id(0)
    tiles_across = tl.cdiv(n, BLOCK_N)
    first_block = number // (GROUP * tiles_across) * GROUP
    together = tl.minimum(num_blocks - first_block, GROUP)
    within = number % (GROUP * tiles_across)
    first_row = (first_block + within % together) * ROWS
    first = within // together * BLOCK_N
    # Rows of x and W beyond the last repeat the last one: their results are not stored.
    output = tl.arange(0, BLOCK_N)
    place = weight + first.to(tl.int64) * K + tl.minimum(output, n - 1 - first) * K
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    target_row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    part_stride = n.to(tl.int64) * K
    if scratch is None:
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for share in range(SHARES):
            more, more_up = sums_over(
                x, place, part_stride, row, x_stride, share * COUNT, K, COUNT, HAS_TAIL, ROWS, BLOCK_N, BLOCK_K, PARTS
            )
            sums += more
            up_sums += more_up
        finish(
            sums, up_sums, out, residual, bias, row_scales, output_scales, num_rows, n, first + output, target_row,
            GATED,
        )  # fmt: skip
    else:
        share = tl.program_id(1)
        sums, up_sums = sums_over(
            x, place, part_stride, row, x_stride, share * COUNT, K, COUNT, HAS_TAIL, ROWS, BLOCK_N, BLOCK_K, PARTS
        )
        scratch += number.to(tl.int64) * (SHARES * PARTS * BLOCK_N * ROWS)
        if leave_share(sums, up_sums, scratch, arrivals + number, share, SHARES, PARTS, BLOCK_N, ROWS):
            sums, up_sums = add_shares(scratch, arrivals + number, SHARES, PARTS, BLOCK_N, ROWS)
            finish(
                sums, up_sums, out, residual, bias, row_scales, output_scales, num_rows, n, first + output, target_row,
                GATED,
            )  # fmt: skip


_launch_product = Launcher(_product)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: str | None = None,
    pdl: bool = False,
    tile: Tile | None = None,
    is_apart: bool | None = None,
) -> torch.Tensor:
    """x [M, K], weight [N, K] → [M, N], summed in float32 and rounded once. Like `few_rows_linear`, for any number of rows.

    tile, is_apart (shares by separate programs): for tests; the bits are the same. pdl only affects the norm."""
    if gated is not None and gated not in ACTIVATIONS:
        raise ConfigError(f"activation {gated!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if norm is not None:
        x = rms_norm(x, *norm, is_fixed=True, pdl=pdl)
    if residual is None:
        out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    else:
        assert residual.is_contiguous() and residual.shape == (x.shape[0], n)
        out = residual
    _launch(x, weight, out, residual, bias, None, gated or "", tile, is_apart)
    return out


def invariant_fp8(
    x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [M, K] float8 with scales [M, 1], weight [N, K] float8 with scales [1, N] → [M, N]."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    assert scales.is_contiguous() and weight_scales.is_contiguous()
    _launch(x, weight, out, None, None, (scales, weight_scales), "", None, None)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    gated: str,
    tile: Tile | None,
    is_apart: bool | None,
) -> None:
    (num_rows, k), n = x.shape, out.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape == (n * (2 if gated else 1), k)
    assert x.dtype == weight.dtype
    if num_rows == 0:
        return
    tile = tile or choose_tile(num_rows, bool(gated))
    if scales is not None:
        # Sums of 8-bit products leave the matrix unit after each block of K, to be added more exactly: use one block size.
        tile = tile._replace(block_k=_GRAIN)
    shares = num_shares(n, k)
    num_blocks = triton.cdiv(num_rows, tile.rows)
    num_tiles = triton.cdiv(n, tile.block_n) * num_blocks
    parts = 2 if gated else 1
    has_room = (
        num_tiles <= MAX_SHARED_TILES and num_tiles * shares * parts * tile.block_n * tile.rows <= SCRATCH_NUMBERS
    )
    if is_apart is None:
        is_apart = num_tiles < 2 * _PROGRAMS
    is_apart = is_apart and shares > 1 and has_room
    scratch, arrivals = scratch_of(x.device) if is_apart else (None, None)
    step_bytes = (parts * tile.block_n + tile.rows) * tile.block_k * x.element_size()
    stages = max(2, min(tile.num_stages, shared_bytes(x.device) // step_bytes))
    _launch_product(
        (num_tiles, shares if is_apart else 1, 1),
        (
            x, weight, out, residual, bias, *(scales or (None, None)), scratch, arrivals, num_rows, num_blocks, n,
            x.stride(0),
        ),
        (k, shares, share_size(k, shares), tile.rows, tile.block_n, tile.block_k, _TOGETHER, gated),
        {"num_warps": tile.num_warps, "num_stages": stages},
    )  # fmt: skip
