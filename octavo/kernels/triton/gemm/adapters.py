"""Low-rank adapters on a GPU: y += scale · (x · Aᵀ) · Bᵀ for the rows that have one, in two launches (decision 052).

Rows with the same adapter are taken together: `order` lists the rows by adapter, and a block is up to BLOCK_ROWS of them. A block brings
the address of its adapter's table, in which every product (its *site*) finds its matrices and their rank. So a captured graph runs with
any adapters, and nothing is compiled for a rank, a length or a number of adapters. Blocks without rows end at once.

The bits of a row do not depend on the other rows, nor on how many there are. Blocks have one shape for all steps. The sum over K is cut
into slices of one length; a slice's sums are added in the order of the slices, whether several programs made them (few rows) or one
(many)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

BLOCK_ROWS = 16
RANK_STEP = 16  # ranks are held as multiples of this
SLICE = 512  # columns of x whose products are summed before they are added to those of others
FIELDS = 6  # of an entry of a table: addresses of A and B, rank, first column, number of columns, the scale's bits
BLOCK_FIELDS = 3  # address of the adapter's table, first place in the order, number of rows
MAX_SPLIT_ROWS = 256  # with more rows there are enough blocks for a GPU without dividing K
_BLOCK_K, _BLOCK_N, _COPY_N = 128, 128, 1024

_BLOCK_ROWS, _RANK_STEP, _SLICE = tl.constexpr(BLOCK_ROWS), tl.constexpr(RANK_STEP), tl.constexpr(SLICE)
_FIELDS, _BLOCK_FIELDS = tl.constexpr(FIELDS), tl.constexpr(BLOCK_FIELDS)


@triton.jit
def _entry(blocks, block, site, part, max_parts):  # type: ignore[no-untyped-def]
    """Where a block's adapter has its matrices for a part of a site. Only for blocks with rows."""
    table = tl.load(blocks + block * _BLOCK_FIELDS).to(tl.pointer_type(tl.int64))
    return table + (site * max_parts + part) * _FIELDS


@triton.jit
def _rank_here(blocks, block, site, part, max_parts, start, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rank of a part; 0: it has no columns from `start` on that are in this tile."""
    entry = _entry(blocks, block, site, part, max_parts)
    rank, first, count = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    return tl.where((first < start + WIDTH) & (first + count > start), rank, 0).to(tl.int32)


@triton.jit(do_not_specialize=["site", "num_tokens", "num_slices"])
def _shrink(  # type: ignore[no-untyped-def]
    x,  # [T, K], rows x_stride apart
    norm,  # [K] weight of an RMSNorm whose factor is multiplied later, or None
    order,  # [T] int32
    blocks,  # [blocks, BLOCK_FIELDS] int64
    inner,  # [groups, T, parts, max_rank] float32, by place in the order
    squares,  # [groups, T, parts] float32: sums of squares of x
    site,
    num_tokens,
    num_slices,  # that one program takes
    max_parts,  # of a table
    max_rank,
    x_stride,
    K,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(blocks + block * _BLOCK_FIELDS + 2).to(tl.int32)
    if count == 0:
        return
    entry = _entry(blocks, block, site, part, max_parts)
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)  # [rank, K]
    at = tl.arange(0, _BLOCK_ROWS)
    is_row = at < count
    place = tl.load(blocks + block * _BLOCK_FIELDS + 1).to(tl.int64) + at
    rows = x + tl.load(order + place, mask=is_row, other=0).to(tl.int64)[:, None] * x_stride
    target = (group.to(tl.int64) * num_tokens + place) * tl.num_programs(2) + part
    column, number = tl.arange(0, BLOCK_K), tl.arange(0, _RANK_STEP)
    first_slice = group * num_slices
    for first_rank in range(0, rank, _RANK_STEP):
        outputs = down + (first_rank + number).to(tl.int64)[None, :] * K
        total = tl.zeros((_BLOCK_ROWS, _RANK_STEP), tl.float32)
        total_squares = tl.zeros((_BLOCK_ROWS,), tl.float32)
        for which in range(first_slice, first_slice + num_slices):
            sums = tl.zeros((_BLOCK_ROWS, _RANK_STEP), tl.float32)
            sum_squares = tl.zeros((_BLOCK_ROWS,), tl.float32)
            for start in range(which * _SLICE, tl.minimum(which * _SLICE + _SLICE, K), BLOCK_K):
                k = start + column
                numbers = tl.load(rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
                if norm is not None:
                    wide = numbers.to(tl.float32)
                    sum_squares += tl.sum(wide * wide, axis=1)
                    wide = wide * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
                    numbers = wide.to(x.dtype.element_ty)
                tile = tl.load(outputs + k[:, None], mask=(k < K)[:, None], other=0.0)
                sums = tl.dot(numbers, tile, sums, input_precision="ieee")
            total += sums
            total_squares += sum_squares
        result = inner + target[:, None] * max_rank + (first_rank + number)[None, :]
        tl.store(result, total, mask=is_row[:, None])
        if norm is not None:
            tl.store(squares + target, total_squares, mask=is_row)


@triton.jit(do_not_specialize=["site", "num_tokens"])
def _expand(  # type: ignore[no-untyped-def]
    y,  # [T, N], rows y_stride apart
    order,
    blocks,
    inner,  # [GROUPS, T, PARTS, max_rank] float32
    squares,  # [GROUPS, T, PARTS] float32, or None: there is no norm
    site,
    num_tokens,
    max_parts,
    max_rank,
    y_stride,
    N,
    depth,  # numbers whose squares were summed
    epsilon,
    PARTS: tl.constexpr,  # of this site
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    count = tl.load(blocks + block * _BLOCK_FIELDS + 2).to(tl.int32)
    if count == 0:
        return
    start = tl.program_id(1) * BLOCK_N
    is_changed = 0
    for part in tl.static_range(PARTS):
        is_changed += (_rank_here(blocks, block, site, part, max_parts, start, BLOCK_N) > 0).to(tl.int32)
    if is_changed == 0:
        return
    at, number, column = tl.arange(0, _BLOCK_ROWS), tl.arange(0, _RANK_STEP), start + tl.arange(0, BLOCK_N)
    is_row = at < count
    place = tl.load(blocks + block * _BLOCK_FIELDS + 1).to(tl.int64) + at
    total = tl.zeros((_BLOCK_ROWS, BLOCK_N), tl.float32)
    for part in tl.static_range(PARTS):
        entry = _entry(blocks, block, site, part, max_parts)
        rank = tl.multiple_of(_rank_here(blocks, block, site, part, max_parts, start, BLOCK_N), 16)
        mine = column - tl.load(entry + 3).to(tl.int32)
        is_mine = (mine >= 0) & (mine < tl.load(entry + 4).to(tl.int32))
        up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)  # [columns, rank]
        scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
        sums = tl.zeros((_BLOCK_ROWS, BLOCK_N), tl.float32)
        for first_rank in range(0, rank, _RANK_STEP):
            narrow = tl.zeros((_BLOCK_ROWS, _RANK_STEP), tl.float32)
            for group in tl.static_range(GROUPS):  # all loads are on their way before the first sum
                source = ((group * num_tokens + place) * PARTS + part) * max_rank
                found = inner + source[:, None] + (first_rank + number)[None, :]
                narrow += tl.load(found, mask=is_row[:, None], other=0.0)
            tile = up + mine.to(tl.int64)[None, :] * rank + (first_rank + number)[:, None]
            outputs = tl.load(tile, mask=is_mine[None, :], other=0.0)
            sums = tl.dot(narrow.to(y.dtype.element_ty), outputs, sums, input_precision="ieee")
        if squares is not None:
            mean = tl.zeros((_BLOCK_ROWS,), tl.float32)
            for group in tl.static_range(GROUPS):
                source = (group * num_tokens + place) * PARTS + part
                mean += tl.load(squares + source, mask=is_row & (rank > 0), other=0.0)
            sums *= tl.rsqrt(mean / depth + epsilon)[:, None]
        total += tl.where(is_mine[None, :] & (rank > 0), sums * scale, 0.0)
    row = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    target = y + row[:, None] * y_stride + column[None, :]
    mask = is_row[:, None] & (column < N)[None, :]
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["site", "num_parts"])
def _take(source, target, order, blocks, site, num_parts, max_parts, N, BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = tl.load(blocks + block * _BLOCK_FIELDS + 2).to(tl.int32)
    if count == 0:
        return
    is_changed = 0
    for part in range(num_parts):
        is_changed += (tl.load(_entry(blocks, block, site, part, max_parts) + 2) > 0).to(tl.int32)
    if is_changed == 0:
        return
    first = tl.load(blocks + block * _BLOCK_FIELDS + 1)
    for at in range(count):
        row = tl.load(order + first + at).to(tl.int64) * N
        tl.store(target + row + column, tl.load(source + row + column, mask=column < N), mask=column < N)


_launch_shrink, _launch_expand, _launch_take = Launcher(_shrink), Launcher(_expand), Launcher(_take)


class AdapterBlocks(NamedTuple):
    """Which rows of a step have which adapter, on the device."""

    order: torch.Tensor  # [T or more] int32
    blocks: torch.Tensor  # [blocks, BLOCK_FIELDS] int64


class Scratch(NamedTuple):
    """What the two launches pass on. One is enough for all products of a stream."""

    inner: torch.Tensor  # float32
    squares: torch.Tensor  # float32
    max_rank: int  # a multiple of RANK_STEP
    max_parts: int  # of an adapter's table


def num_slices(depth: int) -> int:
    return -(-depth // SLICE)


def _early(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Whether launches may begin before the one before them has ended, and the option for it."""
    pdl = starts_early(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def _num_groups(num_tokens: int, depth: int) -> int:
    """Programs that share the sum over K."""
    return num_slices(depth) if num_tokens <= MAX_SPLIT_ROWS else 1


def make_scratch(
    sites: Sequence[tuple[int, int]], max_tokens: int, max_rank: int, max_parts: int, device: torch.device
) -> Scratch:
    """`sites`: the depth and the number of parts of each."""
    few = min(max_tokens, MAX_SPLIT_ROWS)
    numbers = max(parts * max(few * num_slices(depth), max_tokens) for depth, parts in sites)
    rank = -(-max_rank // RANK_STEP) * RANK_STEP
    inner = torch.empty(numbers * rank, dtype=torch.float32, device=device)
    return Scratch(inner, torch.empty(numbers, dtype=torch.float32, device=device), rank, max_parts)


def block_plan(of_rows: NDArray[Any], tables: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`of_rows` [T]: the number of each row's adapter, −1: none; `tables`: the addresses of the adapters' tables. → order [T] int32 and blocks
    [n, BLOCK_FIELDS] int64, n at most T. Rows without an adapter come last, in no block."""
    numbers = np.where(of_rows < 0, len(tables), of_rows)
    order = np.argsort(numbers, kind="stable").astype(np.int32)
    counts = np.bincount(numbers, minlength=len(tables) + 1)[: len(tables)]
    blocks, first = [], 0
    for table, count in zip(tables, counts.tolist(), strict=True):
        for start in range(0, count, BLOCK_ROWS):
            blocks.append((table, first + start, min(BLOCK_ROWS, count - start)))
        first += count
    return order, np.array(blocks, dtype=np.int64).reshape(-1, BLOCK_FIELDS)


def add_adapters(
    y: torch.Tensor,  # [T, N], changed
    x: torch.Tensor,  # [T, K]
    rows: AdapterBlocks,
    site: int,
    num_parts: int,  # of this site; at most scratch.max_parts
    scratch: Scratch,
    norm: tuple[torch.Tensor, float] | None = None,  # x is normed by this RMSNorm: weight and epsilon
) -> None:
    num_tokens, depth = x.shape
    width, num_blocks = y.shape[1], len(rows.blocks)
    assert len(y) == num_tokens and x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype
    if num_tokens == 0 or num_blocks == 0:
        return
    groups = _num_groups(num_tokens, depth)
    inner, squares, max_rank, max_parts = scratch
    assert groups * num_tokens * num_parts * max_rank <= inner.numel() and num_parts <= max_parts
    weight, epsilon = (None, 0.0) if norm is None else norm
    pdl, options = _early(x.device)
    _launch_shrink(
        (num_blocks, groups, num_parts),
        (
            x, weight, rows.order, rows.blocks, inner, squares, site, num_tokens, num_slices(depth) // groups, max_parts, max_rank,
            x.stride(0), depth,
        ),
        (_BLOCK_K, pdl),
        {"num_warps": 4, "num_stages": 3} | options,
    )  # fmt: skip
    _launch_expand(
        (num_blocks, -(-width // _BLOCK_N), 1),
        (
            y, rows.order, rows.blocks, inner, None if norm is None else squares, site, num_tokens, max_parts, max_rank, y.stride(0), width,
            depth, float(epsilon),
        ),
        (num_parts, groups, _BLOCK_N, pdl),
        {"num_warps": 4, "num_stages": 2} | options,
    )  # fmt: skip


def take_changed(
    target: torch.Tensor,  # [T, N], changed
    source: torch.Tensor,  # [T, N]
    rows: AdapterBlocks,
    site: int,
    num_parts: int,
    max_parts: int,
) -> None:
    """Copy the rows whose adapter changes the site."""
    assert target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
    width = target.shape[1]
    pdl, options = _early(target.device)
    if len(target) and len(rows.blocks):
        _launch_take(
            (len(rows.blocks), -(-width // _COPY_N), 1),
            (source, target, rows.order, rows.blocks, site, num_parts, max_parts, width),
            (_COPY_N, pdl),
            {"num_warps": 4} | options,
        )
