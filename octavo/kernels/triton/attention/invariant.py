"""Causal attention over KV pages whose result for a query depends, bit for bit, only on its own cells: not on the batch, nor
on chunks or prefixes. A list of tiles, as in paged_prefill, says which tokens belong together.

Decode and prefill use this one kernel. Cells are divided into splits at fixed positions. Each split is attended from scratch,
block by block, and the splits are folded in order: by one program, or, if rows are few, by a second kernel from the results
of several programs. The numbers and their order are the same either way. A cell that a query does not see, or a split of
such cells, has weight 0 and changes no bit, so it does not matter which queries share a tile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.runtime.chip import shared_bytes
from octavo.kernels.triton.runtime.launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)
SPLIT = 256  # cells; a multiple of every block size
_PROGRAMS = 264  # two for each of the 132 multiprocessors of an H200
_MAX_PARTS = 64
_SCRATCH_NUMBERS = 1 << 24  # float32: 64 MiB


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """Compile-time parameters, chosen by the model's shape alone: decode and prefill share one tile."""

    block_m: int  # (query token, head) pairs of one KV head
    block_n: int
    num_warps: int
    num_stages: int

    def heads(self, group: int) -> int:
        """Query heads of one KV head in a tile: all of them, or equal shares if the tile has too few rows."""
        return -(-group // -(-group // self.block_m))

    def tokens(self, group: int) -> int:
        return self.block_m // self.heads(group)


def choose_tile(head_size: int, dtype: torch.dtype) -> InvariantTile:
    """Choose a tile. It has 64 rows: one matrix instruction of compute capability 9."""
    if dtype.itemsize == 4:
        return InvariantTile(64, 32, 8, 1)
    return InvariantTile(64, 64, 8, 2) if head_size > 128 else InvariantTile(64, 64, 4, 3)


@triton.jit
def _fold(acc, largest, total, part, part_largest, part_total):  # type: ignore[no-untyped-def]
    """Fold one more split into the running state: weighted values, largest exponent, sum of powers. Written with explicit
    fused multiply-adds: left to the compiler, it might fuse other products in the other kernel."""
    higher = tl.maximum(largest, part_largest)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(largest - shift)
    add = tl.exp2(part_largest - shift)
    wide_keep = tl.broadcast_to(keep[:, None], acc.shape)
    return tl.fma(acc, wide_keep, part * add[:, None]), higher, tl.fma(total, keep, part_total * add)


@triton.jit
def _finish(acc, largest, total, sinks, is_head):  # type: ignore[no-untyped-def]
    """The output; zeros for a query that has seen nothing."""
    if sinks is not None:
        # A query that has seen nothing has no largest exponent: its output is 0 with or without a sink.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total += tl.exp2(tl.load(sinks, mask=is_head, other=0.0) * LOG2E - shift)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, pages, table, key_at, value_at, position, first, last,
    HEAD: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the cells first … last − 1 of one split → weighted values [M, D], largest exponent (base 2) and sum of powers
    [M]. Every block is masked, so that all blocks take the same code."""
    column = tl.arange(0, q.shape[1])
    factor: tl.constexpr = LOG2E if SOFTCAP > 0.0 else SCALE * LOG2E
    acc = tl.zeros(q.shape, tl.float32)
    largest = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    for start in range(first, last, BLOCK_N):
        cells = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + cells // PAGE, mask=cells < last, other=0).to(tl.int64)
        place = pages + (page * (2 * KV_HEADS * PAGE * HEAD) + (cells % PAGE) * HEAD)[:, None] + column[None, :]
        mask = (cells < last)[:, None] & (column < HEAD)[None, :]
        k = tl.load(place + key_at, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_N, D]
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")  # [M, BLOCK_N]
        if SOFTCAP > 0.0:
            scores = (2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFTCAP)) - 1.0) * SOFTCAP  # tanh
        is_seen = cells[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= cells[None, :] > position[:, None] - WINDOW
        if FIRST > 0:
            is_seen &= (cells >= FIRST)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1) * factor)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weights = tl.exp2(scores * factor - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = tl.fma(total, fade, tl.sum(weights, 1))
        v = tl.load(place + value_at, mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="tf32x3")
        largest = higher
    return acc, largest, total


@triton.jit
def _first_seen(first_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first cell of the first block that the first token sees."""
    if WINDOW > 0:
        return tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        return first_position * 0


# One binary for decode and prefill, whatever the alignment of tables and lists.
@triton.jit(do_not_specialize=["table_stride", "max_splits"], do_not_specialize_on_alignment=["page_table", "tiles"])
def _tiles(  # type: ignore[no-untyped-def]
    q,  # [T, H, D], tokens q_stride apart
    pages,  # [num_pages, 2, KV_HEADS, PAGE, HEAD]
    page_table,  # [B, M], rows table_stride apart
    tiles,  # [N, 4]: row, first token in T, its position (−1: padding), tokens from it to the row's end
    out,  # [T, H * D]
    partial,  # [N, max_splits, H, HEAD] float32, used if several programs share a tile's splits
    states,  # [N, max_splits, 2, H] float32: largest exponents, sums of powers
    sinks,  # [H] float32 or None
    q_stride,
    table_stride,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // PACK
    SHARES: tl.constexpr = (GROUP + PACK - 1) // PACK
    NUM_HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) // SHARES  # heads vary fastest, so that the heaviest tiles of all heads start first
    number = tl.program_id(1)
    part = tl.program_id(2)
    num_parts = tl.num_programs(2)
    row = tl.load(tiles + number * 4)
    token = tl.load(tiles + number * 4 + 1)
    first_position = tl.load(tiles + number * 4 + 2)
    count = tl.minimum(tl.load(tiles + number * 4 + 3), TOKENS)

    pair = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PADDED)
    in_group = tl.program_id(0) % SHARES * PACK + pair % PACK
    is_query = (pair // PACK < count) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    mask = is_query[:, None] & (column < HEAD)[None, :]
    at = (token + pair // PACK).to(tl.int64)
    query = tl.load(q + (at * q_stride + head * HEAD)[:, None] + column[None, :], mask=mask, other=0.0)
    position = first_position + tl.minimum(pair // PACK, count - 1)
    last = first_position + count
    first = _first_seen(first_position, WINDOW, BLOCK_N)
    table = page_table + row.to(tl.int64) * table_stride

    acc = tl.zeros((BLOCK_M, HEAD_PADDED), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for split in range(first // SPLIT + part, tl.cdiv(last, SPLIT), num_parts):
        more, more_largest, more_total = _attend(
            query, pages, table, kv_head * (PAGE * HEAD), (KV_HEADS + kv_head) * (PAGE * HEAD), position,
            tl.maximum(split * SPLIT, first), tl.minimum((split + 1) * SPLIT, last),
            HEAD, KV_HEADS, PAGE, WINDOW, FIRST, SOFTCAP, SCALE, BLOCK_N,
        )  # fmt: skip
        if num_parts > 1:
            slot = (number.to(tl.int64) * max_splits + split) * NUM_HEADS
            tl.store(partial + (slot + head)[:, None] * HEAD + column[None, :], more, mask=mask)
            tl.store(states + 2 * slot + head, more_largest, mask=is_query)
            tl.store(states + 2 * slot + NUM_HEADS + head, more_total, mask=is_query)
        acc, largest, total = _fold(acc, largest, total, more, more_largest, more_total)
    if num_parts == 1:
        sink = sinks if sinks is None else sinks + head
        result = _finish(acc, largest, total, sink, in_group < GROUP)
        place = out + (at * (NUM_HEADS * HEAD) + head * HEAD)[:, None] + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["tiles"])
def _join(  # type: ignore[no-untyped-def]
    tiles,
    out,
    partial,
    states,
    sinks,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Fold the splits of one token's query heads of one KV head, in the same way as _tiles."""
    NUM_HEADS: tl.constexpr = KV_HEADS * GROUP
    number = tl.program_id(1)
    token = tl.load(tiles + number * 4 + 1)
    first_position = tl.load(tiles + number * 4 + 2)
    in_group = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, HEAD_PADDED)
    head = tl.program_id(0) * GROUP + in_group
    is_head = in_group < GROUP
    mask = is_head[:, None] & (column < HEAD)[None, :]
    acc = tl.zeros((GROUP_PADDED, HEAD_PADDED), tl.float32)
    largest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    first = _first_seen(first_position, WINDOW, BLOCK_N)
    for split in range(first // SPLIT, tl.cdiv(first_position + 1, SPLIT)):
        slot = (number.to(tl.int64) * max_splits + split) * NUM_HEADS
        more = tl.load(partial + (slot + head)[:, None] * HEAD + column[None, :], mask=mask, other=0.0)
        more_largest = tl.load(states + 2 * slot + head, mask=is_head, other=float("-inf"))
        more_total = tl.load(states + 2 * slot + NUM_HEADS + head, mask=is_head, other=0.0)
        acc, largest, total = _fold(acc, largest, total, more, more_largest, more_total)
    sink = sinks if sinks is None else sinks + head
    result = _finish(acc, largest, total, sink, is_head)
    place = out + token.to(tl.int64) * (NUM_HEADS * HEAD) + (head * HEAD)[:, None] + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


_launch_tiles, _launch_join = Launcher(_tiles), Launcher(_join)


def decode_tiles(seq_lens: torch.Tensor) -> torch.Tensor:
    """Tiles of decode rows with seq_lens [B] int32 (0: padding), made on the device so that one graph serves all lengths."""
    rows = torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device)
    return torch.stack((rows, rows, seq_lens - 1, torch.ones_like(rows)), dim=1)


class InvariantAttention:
    """Scratch memory and launches. One instance serves all layers, one launch after another; two streams must not share
    it."""

    def __init__(self, device: torch.device, scratch_numbers: int = _SCRATCH_NUMBERS) -> None:
        self._partial = torch.empty(scratch_numbers, dtype=torch.float32, device=device)
        self._states = torch.empty(scratch_numbers // 8, dtype=torch.float32, device=device)

    def _num_parts(self, num_tiles: int, num_programs: int, max_splits: int, num_heads: int, size: int) -> int:
        """Programs that share a decode tile's splits. Changes only speed."""
        slots = num_tiles * max_splits * num_heads
        if slots * size > self._partial.numel() or 2 * slots > self._states.numel():
            return 1
        return max(1, min(max_splits, _MAX_PARTS, _PROGRAMS // num_programs))

    def run(
        self,
        heads: torch.Tensor,  # [T, H + 2 Hkv, D]: q, k, v; any token stride
        pages: torch.Tensor,  # [num_pages, 2, Hkv, page_size, D], with the step's own keys and values stored
        page_table: torch.Tensor,  # [B, M] int32
        tiles: torch.Tensor,  # [N, 4] int32: decode_tiles(…), or plan_tiles(…, tile.tokens(group)) on the device
        out: torch.Tensor,  # [T, H * D], written for the tokens in tiles
        tile: InvariantTile,
        *,
        scale: float,
        window: int = 0,
        first: int = 0,  # no token sees the cells before this position
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,  # [H] float32: per head, one more score in the softmax, without a value
        is_decode: bool = False,  # every tile is one token
        num_parts: int = 0,  # for tests; 0: automatic
    ) -> None:
        num_kv_heads, page_size, size = pages.shape[2:]
        group = heads.shape[1] // num_kv_heads - 2
        padded = max(16, triton.next_power_of_2(size))
        assert heads.shape[1:] == ((group + 2) * num_kv_heads, size)
        assert heads.stride(1) == size and heads.stride(2) == 1 and pages.is_contiguous()
        assert page_table.stride(1) == 1 and tiles.is_contiguous() and tiles.dtype == torch.int32
        assert out.shape == (heads.shape[0], group * num_kv_heads * size) and out.is_contiguous()
        num_tiles = tiles.shape[0]
        if num_tiles == 0:
            return
        pack = tile.heads(group)
        width = num_kv_heads * triton.cdiv(group, pack)
        max_splits = triton.cdiv(page_table.shape[1] * page_size, SPLIT)
        if not is_decode:
            num_parts = 1
        elif num_parts == 0:
            num_parts = self._num_parts(num_tiles, num_tiles * width, max_splits, group * num_kv_heads, size)
        # Shared memory holds the queries, and for each stage the keys and values of a block.
        row_bytes = padded * heads.element_size()
        room = shared_bytes(heads.device) - tile.block_m * row_bytes
        stages = max(1, min(tile.num_stages, room // (2 * tile.block_n * row_bytes)))
        _launch_tiles(
            (width, num_tiles, num_parts),
            (
                heads, pages, page_table, tiles, out, self._partial, self._states, sinks, heads.stride(0),
                page_table.stride(0), max_splits,
            ),
            (
                num_kv_heads, group, pack, size, padded, page_size, window, first, softcap, scale, tile.block_m,
                tile.block_n, SPLIT,
            ),
            {"num_warps": tile.num_warps, "num_stages": stages},
        )  # fmt: skip
        if num_parts > 1:
            _launch_join(
                (num_kv_heads, num_tiles, 1),
                (tiles, out, self._partial, self._states, sinks, max_splits),
                (num_kv_heads, group, triton.next_power_of_2(group), size, padded, window, tile.block_n, SPLIT),
                {"num_warps": 4},
            )
