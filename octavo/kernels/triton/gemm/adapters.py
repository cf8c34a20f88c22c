"""Low-rank adapters on a GPU: y += scale · (x · Aᵀ) · Bᵀ for the rows that have one, in two launches (decision 052).

The first (*shrink*) makes x · Aᵀ, and needs x alone: it can run beside the product that makes y. The second (*expand*) adds the rest to y, and
can apply a gate on the way.

Rows with the same adapter are taken together: `order` lists the rows by adapter, and a block is up to BLOCK_ROWS of them. A block brings
the address of its adapter's table, in which every product (its *site*) finds its matrices and their rank. So a captured graph runs with
any adapters, and nothing is compiled for a rank, a length or a number of adapters. Rows without an adapter have blocks whose address is 0.
Blocks without rows come last and end at once.

The second launch may begin before the product has ended. What no kernel between the step's inputs and its end writes (blocks, tables, B) is
read before it waits for y: the embedding between receive_adapters() and the first layer is an ordinary launch, which no later one overtakes.

The bits of a row do not depend on the other rows, nor on how many there are. Blocks have one shape for all steps. The sum over K is cut
into slices of one length; a slice's sums are added in the order of the slices, by the last of several programs (few rows) or by one
(many)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.elementwise.activation import ACTIVATIONS, activate
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

BLOCK_ROWS = 16
RANK_STEP = 16  # ranks are held as multiples of this
SLICE = 512  # columns of x whose products are summed before they are added to those of others
FIELDS = 6  # of an entry of a table: addresses of A and B, rank, first column, number of columns, the scale's bits
BLOCK_FIELDS = 3  # address of the adapter's table, first place in the order, number of rows
MAX_SPLIT_ROWS = 256  # with more rows there are enough blocks for a GPU without dividing K
_BLOCK_N, _COPY_N = 256, 1024
# Few registers: these kernels wait for memory, and more of their programs are to wait at a time.
_EXPAND = {"num_warps": 4, "num_stages": 2, "maxnreg": 128}
_PROGRAMS = 2048  # of an expand launch, about: some for each processor

_BLOCK_ROWS, _RANK_STEP, _SLICE = tl.constexpr(BLOCK_ROWS), tl.constexpr(RANK_STEP), tl.constexpr(SLICE)
_FIELDS, _BLOCK_FIELDS = tl.constexpr(FIELDS), tl.constexpr(BLOCK_FIELDS)


@triton.jit
def _block(blocks, block):  # type: ignore[no-untyped-def]
    """Address of the adapter's table, first place in the order, number of rows."""
    fields = blocks + block * _BLOCK_FIELDS
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2).to(tl.int32)


@triton.jit
def _entry(address, site, part, max_parts):  # type: ignore[no-untyped-def]
    """Where an adapter has its matrices for a part of a site."""
    return address.to(tl.pointer_type(tl.int64)) + (site * max_parts + part) * _FIELDS


@triton.jit(do_not_specialize=["site", "num_tokens", "num_slices"])
def _shrink(  # type: ignore[no-untyped-def]
    x,  # [T, K], rows x_stride apart
    norm,  # [K] weight of an RMSNorm whose factor is multiplied at the end, or None
    order,  # [T] int32
    blocks,  # [blocks, BLOCK_FIELDS] int64
    narrow,  # [T, parts, max_rank], by place in the order: (x · Aᵀ) · scale
    sums_of,  # [groups, T, parts, max_rank] float32, or None: one program sums all of K
    squares_of,  # [groups, T, parts] float32: sums of squares of x, or None: no norm, or one program
    arrived,  # [blocks, parts] int32, zeros before and after
    site,
    num_tokens,
    num_slices,  # that one program takes
    max_parts,  # of a table
    max_rank,
    x_stride,
    K,
    epsilon,
    GROUPS: tl.constexpr,  # programs that share the sum over K
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(2)
    address, first_place, count = _block(blocks, block)
    if (count == 0) | (address == 0):
        return
    entry = _entry(address, site, part, max_parts)
    start_down, rank, scale_bits = tl.load(entry), tl.load(entry + 2).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    if rank == 0:
        return
    down = tl.multiple_of(start_down.to(tl.pointer_type(x.dtype.element_ty)), 16)  # [rank, K]
    scale = scale_bits.to(tl.float32, bitcast=True)
    at = tl.arange(0, _BLOCK_ROWS)
    is_row = at < count
    place = first_place + at
    rows = x + tl.load(order + place, mask=is_row, other=0).to(tl.int64)[:, None] * x_stride
    column, number = tl.arange(0, _SLICE), tl.arange(0, _RANK_STEP)
    first_slice = group * num_slices
    result = narrow + (place * parts + part)[:, None] * max_rank + number[None, :]
    for first_rank in range(0, rank, _RANK_STEP):
        outputs = down + (first_rank + number).to(tl.int64)[None, :] * K
        total = tl.zeros((_BLOCK_ROWS, _RANK_STEP), tl.float32)
        squares = tl.zeros((_BLOCK_ROWS,), tl.float32)
        for which in range(first_slice, first_slice + num_slices):
            k = which * _SLICE + column
            numbers = tl.load(rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
            tile = tl.load(outputs + k[:, None], mask=(k < K)[:, None], other=0.0)
            if norm is not None:
                wide = numbers.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                wide = wide * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
                numbers = wide.to(x.dtype.element_ty)
            total += tl.dot(numbers, tile, input_precision="ieee")
        if GROUPS == 1:
            factor = tl.full((_BLOCK_ROWS,), 1.0, tl.float32) * scale
            if norm is not None:
                factor *= tl.rsqrt(squares / K + epsilon)
            found = (total * factor[:, None]).to(narrow.dtype.element_ty)
            tl.store(result + first_rank, found, mask=is_row[:, None])
        else:
            target = (group.to(tl.int64) * num_tokens + place) * parts + part
            mine = sums_of + target[:, None] * max_rank + (first_rank + number)[None, :]
            tl.store(mine, total, mask=is_row[:, None])
            if norm is not None:
                tl.store(squares_of + target, squares, mask=is_row)
    if GROUPS > 1:
        # All threads have stored. The atomic add publishes the stores to the last program, and acquires those of the others.
        tl.debug_barrier()
        counter = arrived + block * parts + part
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == GROUPS - 1:
            tl.store(counter, 0)
            squares = tl.zeros((_BLOCK_ROWS,), tl.float32)
            factor = tl.full((_BLOCK_ROWS,), 1.0, tl.float32) * scale
            if norm is not None:
                for other in tl.static_range(GROUPS):
                    source = (other * num_tokens + place) * parts + part
                    squares += tl.load(squares_of + source, mask=is_row, other=0.0)
                factor *= tl.rsqrt(squares / K + epsilon)
            for first_rank in range(0, rank, _RANK_STEP):
                total = tl.zeros((_BLOCK_ROWS, _RANK_STEP), tl.float32)
                for other in tl.static_range(GROUPS):  # all loads are on their way before the first sum
                    source = (other * num_tokens + place) * parts + part
                    theirs = sums_of + source[:, None] * max_rank + (first_rank + number)[None, :]
                    total += tl.load(theirs, mask=is_row[:, None], other=0.0)
                found = (total * factor[:, None]).to(narrow.dtype.element_ty)
                tl.store(result + first_rank, found, mask=is_row[:, None])


@triton.jit
def _part_here(address, site, max_parts, start, after, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first part behind `after` that changes columns from `start` on: its number (PARTS: none), address of B, rank, first column and
    number of columns; and how many parts follow. The loads of all parts are on their way at once; without a part, or an adapter (address 0),
    the rank is 0."""
    has_table = address != 0
    num_here = 0
    found, up, rank, first, width = PARTS, address * 0, address * 0, address * 0, address * 0
    for part in tl.static_range(PARTS):
        entry = _entry(address, site, part, max_parts)
        its_up, its_rank, its_first, its_width = (
            tl.load(entry + 1, mask=has_table, other=0),
            tl.load(entry + 2, mask=has_table, other=0),
            tl.load(entry + 3, mask=has_table, other=0),
            tl.load(entry + 4, mask=has_table, other=0),
        )
        is_here = (its_rank > 0) & (its_first < start + WIDTH) & (its_first + its_width > start) & (part > after)
        is_it = is_here & (found == PARTS)
        num_here += is_here.to(tl.int32)
        up, rank = tl.where(is_it, its_up, up), tl.where(is_it, its_rank, rank)
        first, width = tl.where(is_it, its_first, first), tl.where(is_it, its_width, width)
        found = tl.where(is_it, part, found)
    return found, up, rank.to(tl.int32), first.to(tl.int32), width.to(tl.int32), num_here - 1


@triton.jit
def _outputs_of(column, up, rank, first, width, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where B [columns, rank] has these columns, which of them are the part's, and the numbers of the first RANK_STEP ranks: most adapters have
    no more, so these loads do not wait for a loop."""
    mine = column - first
    is_mine = (mine >= 0) & (mine < width)
    start_up = tl.multiple_of(up.to(tl.pointer_type(kind)), 16)
    rank = rank // _RANK_STEP * _RANK_STEP  # which it is already; the compiler learns that rows are aligned
    tile = start_up + mine.to(tl.int64)[None, :] * rank + tl.arange(0, _RANK_STEP)[:, None]
    return tile, is_mine, tl.load(tile, mask=is_mine[None, :] & (rank > 0), other=0.0)


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    total, tile, is_mine, outputs, narrow, place, is_row, part, rank, max_rank, PARTS: tl.constexpr
):  # fmt: skip
    """total [BLOCK_ROWS, columns] and what a part adds to these columns. `tile`, `is_mine`, `outputs`: of _outputs_of()."""
    rank = rank // _RANK_STEP * _RANK_STEP
    source = narrow + (place * PARTS + part)[:, None] * max_rank + tl.arange(0, _RANK_STEP)[None, :]
    inner = tl.load(source, mask=is_row[:, None] & (rank > 0), other=0.0)
    total = tl.dot(inner, outputs, total, input_precision="ieee")
    for first_rank in range(_RANK_STEP, rank, _RANK_STEP):
        outputs = tl.load(tile + first_rank, mask=is_mine[None, :], other=0.0)
        inner = tl.load(source + first_rank, mask=is_row[:, None], other=0.0)
        total = tl.dot(inner, outputs, total, input_precision="ieee")
    return total


@triton.jit
def _added_next(  # type: ignore[no-untyped-def]
    total, address, site, max_parts, start, part, column, narrow, place, is_row, max_rank, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The same for the part behind `part`, where parts meet in a tile. → the sum, this part, how many follow."""
    part, up, rank, first, width, num_more = _part_here(address, site, max_parts, start, part, PARTS, WIDTH)
    tile, is_mine, outputs = _outputs_of(column, up, rank, first, width, narrow.dtype.element_ty)
    total = _added(total, tile, is_mine, outputs, narrow, place, is_row, part, rank, max_rank, PARTS)
    return total, part, num_more


@triton.jit(do_not_specialize=["site", "num_blocks"])
def _expand(  # type: ignore[no-untyped-def]
    y,  # [T, N], rows y_stride apart
    order,
    blocks,
    narrow,  # [T, PARTS, max_rank]
    site,
    num_blocks,
    max_parts,
    max_rank,
    y_stride,
    N,
    PARTS: tl.constexpr,  # of this site
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0) * BLOCK_N
    block = tl.program_id(1)
    at, column = tl.arange(0, _BLOCK_ROWS), start + tl.arange(0, BLOCK_N)
    address, first_place, count = _block(blocks, block)
    while count > 0:
        is_row, place = at < count, first_place + at
        row = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        part, up, rank, first, width, num_more = _part_here(address, site, max_parts, start, -1, PARTS, BLOCK_N)
        tile, is_mine, outputs = _outputs_of(column, up, rank, first, width, narrow.dtype.element_ty)
        if PDL:
            gdc_wait()
        if rank > 0:
            target = y + row[:, None] * y_stride + column[None, :]
            mask = is_row[:, None] & (column < N)[None, :]
            numbers = tl.load(target, mask=mask, other=0.0)
            total = tl.zeros((_BLOCK_ROWS, BLOCK_N), tl.float32)
            total = _added(total, tile, is_mine, outputs, narrow, place, is_row, part, rank, max_rank, PARTS)
            for _ in tl.static_range(PARTS - 1):
                if num_more > 0:
                    total, part, num_more = _added_next(
                        total, address, site, max_parts, start, part, column, narrow, place, is_row, max_rank, PARTS, BLOCK_N
                    )  # fmt: skip
            tl.store(target, (numbers.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)
        block += tl.num_programs(1)
        address, first_place, count = _block(blocks, tl.minimum(block, num_blocks - 1))
        count = tl.where(block < num_blocks, count, 0)
    if PDL:
        gdc_wait()  # also where there are no rows: what comes next relies on it


@triton.jit(do_not_specialize=["site", "num_blocks"])
def _expand_gated(  # type: ignore[no-untyped-def]
    y,  # [T, 2 N], rows y_stride apart: gate and up
    out,  # [T, N] contiguous
    order,
    blocks,
    narrow,  # [T, PARTS, max_rank]
    site,
    num_blocks,
    max_parts,
    max_rank,
    y_stride,
    N,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NAME: tl.constexpr,  # of the activation
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0) * BLOCK_N
    block = tl.program_id(1)
    at, column = tl.arange(0, _BLOCK_ROWS), start + tl.arange(0, BLOCK_N)
    address, first_place, count = _block(blocks, block)
    while count > 0:
        is_row, place = at < count, first_place + at
        row = tl.load(order + place, mask=is_row, other=0).to(tl.int64)[:, None]
        mask = is_row[:, None] & (column < N)[None, :]
        part, start_up, rank, first, width, num_more = _part_here(address, site, max_parts, start, -1, PARTS, BLOCK_N)
        part2, start_up2, rank2, first2, width2, num_more2 = _part_here(
            address, site, max_parts, start + N, -1, PARTS, BLOCK_N
        )
        tile, is_mine, outputs = _outputs_of(column, start_up, rank, first, width, narrow.dtype.element_ty)
        tile2, is_mine2, outputs2 = _outputs_of(column + N, start_up2, rank2, first2, width2, narrow.dtype.element_ty)
        if PDL:
            gdc_wait()
        gate = tl.load(y + row * y_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(y + row * y_stride + N + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if address != 0:
            gate = _added(gate, tile, is_mine, outputs, narrow, place, is_row, part, rank, max_rank, PARTS)
            up = _added(up, tile2, is_mine2, outputs2, narrow, place, is_row, part2, rank2, max_rank, PARTS)
            for _ in tl.static_range(PARTS - 1):
                if num_more > 0:  # in the tile of the gate
                    gate, part, num_more = _added_next(
                        gate, address, site, max_parts, start, part, column, narrow, place, is_row, max_rank, PARTS, BLOCK_N
                    )  # fmt: skip
            for _ in tl.static_range(PARTS - 1):
                if num_more2 > 0:
                    up, part2, num_more2 = _added_next(
                        up, address, site, max_parts, start + N, part2, column + N, narrow, place, is_row, max_rank, PARTS, BLOCK_N
                    )  # fmt: skip
        result = activate(gate, NAME) * up
        tl.store(out + row * N + column[None, :], result.to(out.dtype.element_ty), mask=mask)
        block += tl.num_programs(1)
        address, first_place, count = _block(blocks, tl.minimum(block, num_blocks - 1))
        count = tl.where(block < num_blocks, count, 0)
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["site", "num_parts"])
def _take(source, target, order, blocks, site, num_parts, max_parts, N, BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    address, first_place, count = _block(blocks, block)
    if (count == 0) | (address == 0):
        return
    is_changed = 0
    for part in range(num_parts):
        is_changed += (tl.load(_entry(address, site, part, max_parts) + 2) > 0).to(tl.int32)
    if is_changed == 0:
        return
    for at in range(count):
        row = tl.load(order + first_place + at).to(tl.int64) * N
        tl.store(target + row + column, tl.load(source + row + column, mask=column < N), mask=column < N)


_launch_shrink, _launch_expand, _launch_take = Launcher(_shrink), Launcher(_expand), Launcher(_take)
_launch_expand_gated = Launcher(_expand_gated)


class AdapterBlocks(NamedTuple):
    """Which rows of a step have which adapter, on the device."""

    order: torch.Tensor  # [T or more] int32
    blocks: torch.Tensor  # [blocks, BLOCK_FIELDS] int64


class Scratch(NamedTuple):
    """What the two launches pass on. One is enough for all products of a stream."""

    narrow: torch.Tensor  # of the activations' type
    sums: torch.Tensor  # float32
    squares: torch.Tensor  # float32
    arrived: torch.Tensor  # int32, zeros
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
    sites: Sequence[tuple[int, int]], max_tokens: int, max_rank: int, max_parts: int, dtype: torch.dtype, device: torch.device
) -> Scratch:  # fmt: skip
    """`sites`: the depth and the number of parts of each. `dtype`: of activations."""
    few = min(max_tokens, MAX_SPLIT_ROWS)
    partial = max(parts * few * num_slices(depth) for depth, parts in sites)
    rank = -(-max_rank // RANK_STEP) * RANK_STEP
    return Scratch(
        torch.empty(max_tokens * max(parts for _, parts in sites) * rank, dtype=dtype, device=device),
        torch.empty(partial * rank, dtype=torch.float32, device=device),
        torch.empty(partial, dtype=torch.float32, device=device),
        torch.zeros(few * max_parts, dtype=torch.int32, device=device),
        rank,
        max_parts,
    )


def block_plan(of_rows: NDArray[Any], tables: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`of_rows` [T]: the number of each row's adapter, −1: none; `tables`: the addresses of the adapters' tables. → order [T] int32 and blocks
    [n, BLOCK_FIELDS] int64, n at most T. Rows without an adapter come last, in blocks with the address 0."""
    numbers = np.where(of_rows < 0, len(tables), of_rows)
    order = np.argsort(numbers, kind="stable").astype(np.int32)
    counts = np.bincount(numbers, minlength=len(tables) + 1)
    blocks, first = [], 0
    for table, count in zip((*tables, 0), counts.tolist(), strict=True):
        for start in range(0, count, BLOCK_ROWS):
            blocks.append((table, first + start, min(BLOCK_ROWS, count - start)))
        first += count
    return order, np.array(blocks, dtype=np.int64).reshape(-1, BLOCK_FIELDS)


def shrink(
    x: torch.Tensor,  # [T, K]
    rows: AdapterBlocks,
    site: int,
    num_parts: int,  # of this site; at most scratch.max_parts
    scratch: Scratch,
    norm: tuple[torch.Tensor, float] | None = None,  # x is normed by this RMSNorm: weight and epsilon
) -> None:
    """x · Aᵀ of all rows with an adapter, into the scratch memory: for the next expand()."""
    num_tokens, depth = x.shape
    num_blocks = len(rows.blocks)
    assert x.stride(1) == 1 and x.dtype == scratch.narrow.dtype
    if num_tokens == 0 or num_blocks == 0:
        return
    groups = _num_groups(num_tokens, depth)
    narrow, sums, squares, arrived, max_rank, max_parts = scratch
    assert num_tokens * num_parts * max_rank <= narrow.numel() and num_parts <= max_parts
    assert groups == 1 or groups * num_tokens * num_parts * max_rank <= sums.numel()
    assert groups == 1 or num_blocks * num_parts <= arrived.numel()
    weight, epsilon = (None, 0.0) if norm is None else norm
    pdl, options = _early(x.device)
    _launch_shrink(
        (num_blocks, groups, num_parts),
        (
            x, weight, rows.order, rows.blocks, narrow, sums, squares, arrived, site, num_tokens, num_slices(depth) // groups, max_parts,
            max_rank, x.stride(0), depth, float(epsilon),
        ),
        (groups, pdl),
        {"num_warps": 4 if norm is None else 8, "num_stages": 2} | options,
    )  # fmt: skip


def expand(
    y: torch.Tensor,  # [T, N], changed
    rows: AdapterBlocks,
    site: int,
    num_parts: int,
    scratch: Scratch,
) -> None:
    """Add the rest of the adapters' products, after shrink() of the same site."""
    width, num_blocks = y.shape[1], len(rows.blocks)
    assert y.stride(1) == 1 and y.dtype == scratch.narrow.dtype
    if len(y) == 0 or num_blocks == 0:
        return
    pdl, options = _early(y.device)
    _launch_expand(
        _expand_grid(width, num_blocks),
        (
            y, rows.order, rows.blocks, scratch.narrow, site, num_blocks, scratch.max_parts, scratch.max_rank, y.stride(0), width,
        ),
        (num_parts, _BLOCK_N, pdl),
        _EXPAND | options,
    )  # fmt: skip


def expand_gated(
    y: torch.Tensor,  # [T, 2 N]: gate and up
    rows: AdapterBlocks,
    site: int,
    num_parts: int,
    scratch: Scratch,
    activation: str,  # of elementwise.activation.ACTIVATIONS
) -> torch.Tensor:
    """activation(gate) · up of the sums, [T, N], in one pass and rounded once. Also of rows without an adapter."""
    num_tokens, width, num_blocks = len(y), y.shape[1] // 2, len(rows.blocks)
    assert y.stride(1) == 1 and y.dtype == scratch.narrow.dtype and activation in ACTIVATIONS
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if num_tokens == 0 or num_blocks == 0:
        return out
    pdl, options = _early(y.device)
    _launch_expand_gated(
        _expand_grid(width, num_blocks),
        (
            y, out, rows.order, rows.blocks, scratch.narrow, site, num_blocks, scratch.max_parts, scratch.max_rank, y.stride(0), width,
        ),
        (num_parts, _BLOCK_N, activation, pdl),
        _EXPAND | options,
    )  # fmt: skip
    return out


def _expand_grid(width: int, num_blocks: int) -> tuple[int, int, int]:
    """Blocks without rows cost little, and a program with several blocks takes one after the other."""
    tiles = -(-width // _BLOCK_N)
    return tiles, min(num_blocks, -(-_PROGRAMS // tiles)), 1


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
