"""Causal attention of rows with several query tokens over their KV pages, or directly over the keys and values of this step.
A list of tiles, made on the host, says which tokens belong together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.attention.merge import with_sinks
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher

LOG2E = tl.constexpr(1.4426950408889634)
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of one program: `block_m` (query token, head of one KV head) pairs against `block_n` cells at a time.

    All query heads of a KV head share a tile, so that they read their keys and values once, however short the row is, and
    the diagonal, half of which is wasted, is only `tokens` wide instead of `block_m`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    is_specialised: bool = False  # use the kernel of paged_prefill_hopper.py, whose block sizes are fixed

    def heads(self, group: int) -> int:
        """Query heads of one KV head in a tile: all of them, or equal shares if the tile has too few rows."""
        if self.is_specialised:
            return 1 << (group - 1).bit_length()
        return -(-group // -(-group // self.block_m))

    def tokens(self, group: int) -> int:
        return self.block_m // self.heads(group)


def choose_tile(
    head_size: int,
    group: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    capability: tuple[int, int] = (0, 0),
    needs_general: bool = False,
) -> Tile:
    """Choose a tile by shape: the fastest that benchmarks/kernels/paged_prefill.py measured on an H200.

    `needs_general`: the layer has a window, a soft cap, sinks or keys that no token sees, which the specialised kernel does not support."""
    padded = triton.next_power_of_2(head_size)
    if capability == (9, 0) and not needs_general:
        from octavo.kernels.triton.attention import paged_prefill_hopper  # needs Gluon, which other GPUs do not

        if paged_prefill_hopper.fits(head_size, group, page_size, dtype, kv_dtype):
            return Tile(128, 128, 12, 2, is_specialised=True)
    if dtype == torch.float32:
        return Tile(32 if padded > 128 else 64, 32, 4, 1)
    if padded > 128:
        return Tile(128, 64, 8, 2)
    return Tile(64, 64, 4, 3)


def plan_tiles(
    query_lens: Sequence[int], seq_lens: Sequence[int], first_row: int, block_m: int
) -> npt.NDArray[np.int32]:
    """Tiles [N, 4]: row, first token in T, its position, tokens from it to the row's end; callers may pad with zeros. A tile
    holds `block_m` tokens.

    Rows before `first_row` get no tiles. Tiles that see the most cells come first, so that the last programs to start are
    short."""
    lens = np.array(query_lens, dtype=np.int32)  # [B], a copy
    starts = np.cumsum(lens, dtype=np.int32) - lens
    lens[:first_row] = 0
    counts = -(-lens // block_m)
    row = np.repeat(np.arange(lens.size, dtype=np.int32), counts)  # [N]
    first = (np.arange(row.size, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    tiles = np.empty((row.size, 4), dtype=np.int32)
    tiles[:, 0] = row
    tiles[:, 1] = starts[row] + first
    tiles[:, 2] = np.asarray(seq_lens, dtype=np.int32)[row] - lens[row] + first
    tiles[:, 3] = lens[row] - first
    end = tiles[:, 2] + np.minimum(tiles[:, 3], block_m)
    return tiles[np.argsort(-end, kind="stable")]


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    kv, table, at, cells, end, column,
    HEAD: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys or values [block_n, D] of a row's cells; 0 beyond its end. `at`: offset of this KV head's keys or values
    in a page."""
    is_own = cells < end
    page = tl.load(table + cells // PAGE, mask=is_own, other=0) if MASKED else tl.load(table + cells // PAGE)
    place = page.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD) + (cells % PAGE) * HEAD + at
    places = kv + place[:, None] + column[None, :]
    if MASKED:
        return tl.load(places, mask=is_own[:, None] & (column < HEAD)[None, :], other=0.0)
    elif column.shape[0] == HEAD:
        return tl.load(places)
    else:
        return tl.load(places, mask=(column < HEAD)[None, :], other=0.0)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, acc, largest, total, kv, table, token, key_at, value_at, position, first, last, end,
    HEAD: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the cells first … last − 1. MASKED: some of them are not seen by all rows of the tile."""
    column = tl.arange(0, acc.shape[1])
    factor: tl.constexpr = LOG2E if SOFTCAP > 0.0 else SCALE * LOG2E
    for start in tl.range(first, last, BLOCK_N):
        cells = start + tl.arange(0, BLOCK_N)
        if PAGE == 0:
            k = kv.load([token + start, key_at])  # [BLOCK_N, D]
        else:
            k = _block(kv, table, key_at, cells, end, column, HEAD, PAGE, KV_HEADS, MASKED)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3")  # [BLOCK_M, BLOCK_N]
        if SOFTCAP > 0.0:
            scores = (2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFTCAP)) - 1.0) * SOFTCAP  # tanh
        if MASKED:
            is_seen = cells[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen &= cells[None, :] > position[:, None] - WINDOW
            if FIRST > 0:
                is_seen &= (cells >= FIRST)[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        if MASKED and (WINDOW > 0 or FIRST > 0):  # a row may have seen nothing so far, and exp2(-inf - -inf) is NaN
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        else:
            shift = new_largest
        weights = tl.exp2(scores * factor - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        largest = new_largest
        if PAGE == 0:
            v = kv.load([token + start, value_at])
        else:
            v = _block(kv, table, value_at, cells, end, column, HEAD, PAGE, KV_HEADS, MASKED)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="tf32x3")
    return acc, largest, total


@triton.jit
def _runs(first_position, last, WINDOW: tl.constexpr, FIRST: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begins and ends of three runs of cells: the left edge of the window, or the block with the first cell that is seen at all; cells seen by
    all rows of the tile; the diagonal.
    Only the middle one needs no mask."""
    all_see = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        edge = tl.maximum(first, tl.cdiv(tl.maximum(last - WINDOW, 0), BLOCK_N) * BLOCK_N)
        all_see = tl.maximum(all_see, edge)
        return (first, edge, all_see), (tl.minimum(edge, last), all_see, last)
    elif FIRST > 0:
        edge = tl.minimum(all_see, BLOCK_N)
        return (0, edge, all_see), (edge, all_see, last)
    else:
        return (0, 0, all_see), (0, all_see, last)


@triton.jit
def _heads_at(kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a KV head's keys and values: in a token's heads, or in a page."""
    if PAGE == 0:
        return (KV_HEADS * GROUP + kv_head) * HEAD, (KV_HEADS * (GROUP + 1) + kv_head) * HEAD
    else:
        return kv_head * (PAGE * HEAD), (KV_HEADS + kv_head) * (PAGE * HEAD)


# One binary whatever the alignment of page table and tile list, so that a start compiles nothing twice.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "tiles"])
def _prefill(  # type: ignore[no-untyped-def]
    q,  # [T, H, D], tokens q_stride apart
    kv,  # pages [num_pages, 2, KV_HEADS, PAGE, HEAD]; PAGE = 0: descriptor of the heads [T, (H + 2 KV_HEADS) HEAD]
    page_table,  # [B, M], rows table_stride apart
    tiles,  # [N, 4] from plan_tiles
    out,  # [T, H * D]
    sinks,  # [H] float32 or None
    q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // PACK
    SHARES: tl.constexpr = (GROUP + PACK - 1) // PACK
    # Heads vary fastest, so that the heaviest tiles of all heads start first.
    kv_head = tl.program_id(0) // SHARES
    tile = tiles + tl.program_id(1) * 4
    row = tl.load(tile)
    token = tl.load(tile + 1)
    first_position = tl.load(tile + 2)
    count = tl.load(tile + 3)
    if count == 0:
        return

    pair = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PADDED)
    in_group = tl.program_id(0) % SHARES * PACK + pair % PACK
    is_query = (pair // PACK < tl.minimum(count, TOKENS)) & (in_group < GROUP)
    head = (kv_head * GROUP + in_group) * HEAD
    mask = is_query[:, None] & (column < HEAD)[None, :]
    at = (token + pair // PACK).to(tl.int64)
    query = tl.load(q + (at * q_stride + head)[:, None] + column[None, :], mask=mask, other=0.0)  # [BLOCK_M, D]
    # Padding pairs get the position of the last query, so that nothing divides by 0.
    position = tl.minimum(first_position + pair // PACK, first_position + tl.minimum(count, TOKENS) - 1)

    end = first_position + count  # of the row, this step's tokens included
    last = first_position + tl.minimum(count, TOKENS)
    table = page_table + row.to(tl.int64) * table_stride
    key_at, value_at = _heads_at(kv_head, KV_HEADS, GROUP, HEAD, PAGE)
    acc = tl.zeros((BLOCK_M, HEAD_PADDED), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # score, times log2(e)
    total = tl.zeros((BLOCK_M,), tl.float32)
    starts, ends = _runs(first_position, last, WINDOW, FIRST, BLOCK_N)
    for run in tl.static_range(3):
        if (WINDOW > 0 or FIRST > 0) or run > 0:
            acc, largest, total = _attend(
                query, acc, largest, total, kv, table, token - first_position, key_at, value_at, position,
                starts[run], ends[run], end, HEAD, KV_HEADS, PAGE, WINDOW, FIRST, SOFTCAP, SCALE, BLOCK_N, run != 1,
            )  # fmt: skip
    if sinks is not None:
        total = with_sinks(largest, total, sinks + kv_head * GROUP + in_group, in_group < GROUP)
    if FIRST > 0:  # a query before that position has seen nothing
        total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    place = out + (at * (KV_HEADS * GROUP * HEAD) + head)[:, None] + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


_launch_prefill = Launcher(_prefill)
_blocks = Descriptors(TensorDescriptor)


def paged_prefill(
    heads: torch.Tensor,  # [T, H + 2 Hkv, D]: q, k, v; any token stride
    pages: torch.Tensor,  # [num_pages, 2, Hkv, page_size, D]
    page_table: torch.Tensor,  # [B, M] int32
    tiles: torch.Tensor,  # [N, 4] int32: plan_tiles(…, tile.tokens(group)), on the device; zeros are skipped
    out: torch.Tensor,  # [T, H * D], written for the tokens in tiles
    tile: Tile,
    *,
    scale: float,
    window: int = 0,
    first: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [H] float32: per head, one more score in the softmax, without a value
    has_no_prefix: bool = False,
) -> None:
    """Attend: each query token sees the cells of its row up to its own position, or the last `window` of them.
    None sees the cells before `first`; one that sees no other gets zeros.

    `has_no_prefix`: no row has a prefix, and `heads` holds keys and values as the pages do (normalised, rotated, finite): read
    them from there, in blocks instead of page by page. Needs a head size that is a power of two."""
    num_kv_heads, page_size, size = pages.shape[2:]
    group = heads.shape[1] // num_kv_heads - 2
    padded = max(16, 1 << (size - 1).bit_length())
    assert heads.shape[1:] == ((group + 2) * num_kv_heads, size) and size <= MAX_HEAD_SIZE
    assert heads.stride(1) == size and heads.stride(2) == 1
    assert pages.is_contiguous() and page_size & (page_size - 1) == 0
    assert page_table.stride(1) == 1 and tiles.is_contiguous() and tiles.dtype == torch.int32
    assert out.shape == (heads.shape[0], group * num_kv_heads * size) and out.is_contiguous()
    if tiles.shape[0] == 0:
        return
    if tile.is_specialised:
        from octavo.kernels.triton.attention import paged_prefill_hopper

        assert not window and not first and not softcap and sinks is None
        paged_prefill_hopper.launch(heads, pages, page_table, tiles, out, scale=scale, has_no_prefix=has_no_prefix)
        return
    assert first <= tile.block_n and not (first and window)
    kv = whole_blocks(heads, tile.block_n) if has_no_prefix else pages
    pack = tile.heads(group)
    _launch_prefill(
        (num_kv_heads * -(-group // pack), tiles.shape[0], 1),
        (heads, kv, page_table, tiles, out, sinks, heads.stride(0), page_table.stride(0)),
        (
            num_kv_heads, group, pack, size, padded, 0 if has_no_prefix else page_size, window, first, softcap, scale,
            tile.block_m, tile.block_n,
        ),
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )  # fmt: skip


def whole_blocks(heads: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Descriptor of blocks [block_n, D] of any head of consecutive tokens; 0 beyond the last token."""
    num_tokens, num_heads, size = heads.shape
    assert size & (size - 1) == 0
    return _blocks(heads, (num_tokens, num_heads * size), (heads.stride(0), 1), (block_n, size))
