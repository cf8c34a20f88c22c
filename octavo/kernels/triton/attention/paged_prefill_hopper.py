"""Prefill attention for the tensor cores of compute capability 9: one warp fetches, two groups of four warps multiply.
Windows, soft caps, sinks and 8-bit stores are supported only by paged_prefill.py."""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from octavo.kernels.triton.runtime.launch import Descriptors, Launcher, knows_gluon

LOG2E = 1.4426950408889634
ROWS = gl.constexpr(64)  # (token, head) pairs of one consumer: the rows of one matrix instruction
PANEL = gl.constexpr(64)  # columns: 128 bytes, the widest swizzle
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
MAX_REGISTERS = 168  # a thread's share of 65536 with 12 warps; the consumers get what the producer gives up


@aggregate
class Shape:
    """Compile-time constants."""

    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr  # query heads of a KV head
    PACK: gl.constexpr  # GROUP, rounded up to a power of two
    HEAD: gl.constexpr
    PAGE: gl.constexpr  # 0: read keys and values from the heads, token after token
    PIECE: gl.constexpr  # cells per copy
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    FACTOR: gl.constexpr  # of the scores, log2(e) included
    IN_TURN: gl.constexpr  # consumers issue products alternately, so that one's softmax overlaps the other's products

    @gluon.constexpr_function
    def __init__(self, KV_HEADS, GROUP, PACK, HEAD, PAGE, PIECE, BLOCK_N, STAGES, FACTOR, IN_TURN):  # type: ignore[no-untyped-def]
        self.KV_HEADS = gl.constexpr(KV_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.PACK = gl.constexpr(PACK)
        self.HEAD = gl.constexpr(HEAD)
        self.PAGE = gl.constexpr(PAGE)
        self.PIECE = gl.constexpr(PIECE)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.FACTOR = gl.constexpr(FACTOR)
        self.IN_TURN = gl.constexpr(IN_TURN)


@gluon.jit
def _lane(step):  # type: ignore[no-untyped-def]
    """This program's tile of a round. Tiles come heaviest first; the direction alternates between rounds, so that no program
    gets the heaviest of every round."""
    last = gl.num_programs(0) - 1
    return gl.program_id(0) if step % 2 == 0 else last - gl.program_id(0)


@gluon.jit
def _num_steps(num_items):  # type: ignore[no-untyped-def]
    rounds = num_items // gl.num_programs(0)
    return rounds + (_lane(rounds) < num_items - rounds * gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _read_tile(tiles, item, shape):  # type: ignore[no-untyped-def]
    """Row, first token, its position, tokens to the row's end, and number of cell blocks that its tokens see."""
    tile = tiles + item // shape.KV_HEADS * 4
    position = gl.load(tile + 2)
    count = gl.load(tile + 3)
    end = position + gl.minimum(count, 2 * ROWS // shape.PACK)
    return gl.load(tile), gl.load(tile + 1), position, count, gl.maximum(gl.cdiv(end, shape.BLOCK_N), 1)


@gluon.jit
def _fetch(kv, table, ring, number, block, last_cell, token, column, kv_head, shape):  # type: ignore[no-untyped-def]
    """Fetch one block of keys or values, the `number`-th of the ring: one copy per piece and panel. Cells beyond the row's
    end come from its last page; the mask hides them."""
    pieces, full, empty = ring
    NUM_PIECES: gl.constexpr = shape.BLOCK_N // shape.PIECE
    NUM_PANELS: gl.constexpr = shape.HEAD // PANEL
    slot = number % shape.STAGES
    ready = full.index(slot)
    # Read the pieces' places before the wait: this takes as long as a copy.
    at = ()
    for piece in gl.static_range(NUM_PIECES):
        cell = block * shape.BLOCK_N + piece * shape.PIECE
        if shape.PAGE == 0:
            at = at + (token + cell,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            page = gl.load(table + gl.minimum(cell, last_cell) // shape.PAGE)
            first = (page * (2 * shape.KV_HEADS) + kv_head) * shape.PAGE
            at = at + (first + cell % shape.PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
    mbarrier.expect(ready, shape.BLOCK_N * shape.HEAD * 2)
    for piece in gl.static_range(NUM_PIECES):
        for panel in gl.static_range(NUM_PANELS):
            place = pieces.index((slot * NUM_PANELS + panel) * NUM_PIECES + piece)
            tma.async_copy_global_to_shared(kv, [at[piece], column + panel * PANEL], ready, place)


@gluon.jit
def _produce(q, kv, page_table, tiles, table_stride, num_items, queries, keys, values, shape):  # type: ignore[no-untyped-def]
    """The fetching warp: queries for both consumers, then keys one block ahead of values, from the last block to the first."""
    query_panels, query_full, query_empty = queries
    TOKENS: gl.constexpr = ROWS // shape.PACK
    number = 0
    for step in range(_num_steps(num_items)):
        item = step * gl.num_programs(0) + _lane(step)
        head = item % shape.KV_HEADS
        row, token, position, count, blocks = _read_tile(tiles, item, shape)
        table = page_table + row.to(gl.int64) * table_stride
        for consumer in gl.static_range(2):
            ready = query_full.index(consumer)
            mbarrier.wait(query_empty.index(consumer), (step & 1) ^ 1)
            mbarrier.expect(ready, ROWS * shape.HEAD * 2)
            for panel in gl.static_range(shape.HEAD // PANEL):
                at = [token + consumer * TOKENS, head * shape.GROUP, panel * PANEL]
                place = query_panels.index(consumer * (shape.HEAD // PANEL) + panel)
                tma.async_copy_global_to_shared(q, at, ready, place)
        last_cell = gl.maximum(position + count - 1, 0)
        token -= position
        key_at = 0
        value_at = 0
        if shape.PAGE == 0:
            key_at = (shape.KV_HEADS * shape.GROUP + head) * shape.HEAD
            value_at = key_at + shape.KV_HEADS * shape.HEAD
        value_head = shape.KV_HEADS + head
        _fetch(kv, table, keys, number, blocks - 1, last_cell, token, key_at, head, shape)
        for block in range(blocks - 1, 0, -1):
            _fetch(kv, table, keys, number + 1, block - 1, last_cell, token, key_at, head, shape)
            _fetch(kv, table, values, number, block, last_cell, token, value_at, value_head, shape)
            number += 1
        _fetch(kv, table, values, number, 0, last_cell, token, value_at, value_head, shape)
        number += 1


@gluon.jit
def _weigh(scores, largest, total, position, first_cell, shape, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [ROWS, BLOCK_N] → weights, the factor for the sums so far, the new largest exponent and the new total."""
    if MASKED:
        cells = first_cell + gl.arange(0, shape.BLOCK_N, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(cells[None, :] <= position[:, None], scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, 1) * shape.FACTOR)
    shift = new_largest
    if MASKED:  # a row may have seen nothing so far, and exp2(-inf - -inf) is NaN
        shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = gl.exp2(scores * shape.FACTOR - shift[:, None])
    fade = gl.exp2(largest - shift)
    return weights, fade, new_largest, total * fade + gl.sum(weights, 1)


@gluon.jit
def _advance(  # type: ignore[no-untyped-def]
    q, keys, values, turns, turn, number, acc, weights, largest, total, position, first_cell, shape,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Multiply the values of block `number` while the softmax of the next block's scores runs."""
    key_blocks, key_full, key_empty = keys
    value_blocks, value_full, value_empty = values
    slot, value_slot = (number + 1) % shape.STAGES, number % shape.STAGES
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    left = gl.convert_layout(weights.to(q.dtype), operand)
    score_layout: gl.constexpr = weights.type.layout
    zeros = gl.zeros((ROWS, shape.BLOCK_N), gl.float32, score_layout)
    mbarrier.wait(key_full.index(slot), (number + 1) // shape.STAGES & 1)
    if shape.IN_TURN:
        mbarrier.wait(turns.index(CONSUMER), (turn + 1 + CONSUMER) & 1)
    scores = warpgroup_mma(q, key_blocks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(value_full.index(value_slot), number // shape.STAGES & 1)
    acc = warpgroup_mma(left, value_blocks.index(value_slot), acc, is_async=True)
    if shape.IN_TURN:
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_empty.index(slot), count=1)
    weights, fade, largest, total = _weigh(scores, largest, total, position, first_cell, shape, MASKED)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    mbarrier.arrive(value_empty.index(value_slot), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, weights, largest, total


@gluon.jit
def _first_scores(q, keys, number, shape, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    key_blocks, key_full, key_empty = keys
    slot = number % shape.STAGES
    zeros = gl.zeros((ROWS, shape.BLOCK_N), gl.float32, layout)
    mbarrier.wait(key_full.index(slot), number // shape.STAGES & 1)
    scores = warpgroup_mma(q, key_blocks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(key_empty.index(slot), count=1)
    return scores


@gluon.jit
def _last_values(acc, weights, values, number, shape):  # type: ignore[no-untyped-def]
    value_blocks, value_full, value_empty = values
    slot = number % shape.STAGES
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    left = gl.convert_layout(weights, operand)
    mbarrier.wait(value_full.index(slot), number // shape.STAGES & 1)
    acc = warpgroup_mma(left, value_blocks.index(slot), acc, is_async=True)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    mbarrier.arrive(value_empty.index(slot), count=1)
    return acc


@gluon.jit
def _consume(tiles, out, num_items, queries, keys, values, turns, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four consumer warps: 64 (token, head) pairs of each tile against all cells they see, from the last block to the
    first."""
    query_blocks, query_full, query_empty = queries
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.HEAD, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    q = query_blocks.index(CONSUMER)
    pair = gl.arange(0, ROWS, of_rows)
    number = 0
    for step in range(_num_steps(num_items)):
        item = step * gl.num_programs(0) + _lane(step)
        _row, token, first_position, count, blocks = _read_tile(tiles, item, shape)
        masked = gl.maximum(blocks - (first_position + 1) // shape.BLOCK_N, 1)
        position = first_position + (CONSUMER * ROWS + pair) // shape.PACK
        acc = gl.zeros((ROWS, shape.HEAD), gl.float32, out_layout)
        largest = gl.full((ROWS,), float("-inf"), gl.float32, of_rows)
        total = gl.zeros((ROWS,), gl.float32, of_rows)

        mbarrier.wait(query_full.index(CONSUMER), step & 1)
        scores = _first_scores(q, keys, number, shape, score_layout)
        first_cell = (blocks - 1) * shape.BLOCK_N
        weights, _fade, largest, total = _weigh(scores, largest, total, position, first_cell, shape, True)
        for _ in range(1, masked):
            first_cell -= shape.BLOCK_N
            acc, weights, largest, total = _advance(
                q, keys, values, turns, number - step, number, acc, weights, largest, total, position, first_cell, shape,
                CONSUMER, True,
            )  # fmt: skip
            number += 1
        for _ in range(masked, blocks):
            acc, weights, largest, total = _advance(
                q, keys, values, turns, number - step, number, acc, weights, largest, total, position, 0, shape,
                CONSUMER, False,
            )  # fmt: skip
            number += 1
        mbarrier.arrive(query_empty.index(CONSUMER), count=1)

        acc = _last_values(acc, weights.to(q.dtype), values, number, shape)
        number += 1
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))[:, None]
        _store(out, acc.to(q.dtype), token, count, item % shape.KV_HEADS, shape, CONSUMER)


@gluon.jit
def _store(out, result, token, count, kv_head, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.HEAD, shape.HEAD // 8], [4, 1], [1, 0])
    pair = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, shape.HEAD, gl.SliceLayout(0, layout))
    is_query = (pair // shape.PACK < count) & (pair % shape.PACK < shape.GROUP)
    place = (token + pair // shape.PACK).to(gl.int64) * (shape.KV_HEADS * shape.GROUP * shape.HEAD)
    place += (kv_head * shape.GROUP + pair % shape.PACK) * shape.HEAD
    gl.store(out + place[:, None] + column[None, :], gl.convert_layout(result, layout), mask=is_query[:, None])


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["table_stride", "num_items"], do_not_specialize_on_alignment=["page_table", "tiles"])
def _prefill(  # type: ignore[no-untyped-def]
    q,  # descriptor of the heads [T, H + 2 Hkv, D] in blocks [64 / PACK, PACK, 64]
    kv,  # descriptor of all pages as rows [.., D], or of the heads [T, (H + 2 Hkv) D], in blocks [PIECE, 64]
    page_table, tiles, out, table_stride, num_items,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FACTOR: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = kv.block_type.shape[0]
    PACK: gl.constexpr = q.block_type.shape[1]
    NUM_PANELS: gl.constexpr = HEAD // PANEL
    shape = Shape(KV_HEADS, GROUP, PACK, HEAD, PAGE, PIECE, BLOCK_N, STAGES, FACTOR, IN_TURN)
    query_panels = gl.allocate_shared_memory(q.dtype, [2 * NUM_PANELS, ROWS // PACK, PACK, PANEL], q.layout)
    key_pieces = gl.allocate_shared_memory(q.dtype, [STAGES * NUM_PANELS * BLOCK_N // PIECE, PIECE, PANEL], kv.layout)
    value_pieces = gl.allocate_shared_memory(q.dtype, [STAGES * NUM_PANELS * BLOCK_N // PIECE, PIECE, PANEL], kv.layout)
    # The pieces of a panel are contiguous, and so are panels: the products read them as one block.
    query_blocks = query_panels._reinterpret(q.dtype, [2, ROWS, HEAD], kv.layout)
    key_blocks = key_pieces._reinterpret(q.dtype, [STAGES, BLOCK_N, HEAD], kv.layout)
    value_blocks = value_pieces._reinterpret(q.dtype, [STAGES, BLOCK_N, HEAD], kv.layout)
    query_full, query_empty, turns = _barriers(2, 1), _barriers(2, 1), _barriers(2, 1)
    key_full, key_empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    value_full, value_empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    queries, in_queries = (query_blocks, query_full, query_empty), (query_panels, query_full, query_empty)
    keys, in_keys = (key_blocks, key_full, key_empty), (key_pieces, key_full, key_empty)
    values, in_values = (value_blocks, value_full, value_empty), (value_pieces, value_full, value_empty)
    gl.warp_specialize(
        [
            (_consume, (tiles, out, num_items, queries, keys, values, turns, shape, 0)),
            (_consume, (tiles, out, num_items, queries, keys, values, turns, shape, 1)),
            (_produce, (q, kv, page_table, tiles, table_stride, num_items, in_queries, in_keys, in_values, shape)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


_launch_prefill = Launcher(_prefill)
_queries = Descriptors(lambda *parts: TensorDescriptor(*parts, QUERY_LAYOUT))
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, PANEL_LAYOUT))


def fits(head_size: int, group: int, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether this kernel supports the shape: one or two panels of 64 columns, a group that fits into a consumer, pages of
    whole swizzle patterns, and a Triton version with the right Gluon."""
    is_half = dtype in (torch.bfloat16, torch.float16) and kv_dtype == dtype
    return is_half and head_size in (64, 128) and group <= 64 and page_size >= 8 and knows_gluon()


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    heads: torch.Tensor,  # [T, H + 2 Hkv, D]
    pages: torch.Tensor,  # [num_pages, 2, Hkv, page_size, D]
    page_table: torch.Tensor,  # [B, M] int32
    tiles: torch.Tensor,  # [N, 4] int32: plan_tiles(…, 128 // group rounded up to a power of two)
    out: torch.Tensor,  # [T, H * D]
    *,
    scale: float,
    has_no_prefix: bool,
    block_n: int = 128,
    num_stages: int = 2,
    in_turn: bool = False,
) -> None:
    """Do the work of paged_prefill, which has checked the shapes. One program per multiprocessor loops over its share of the
    tiles."""
    num_tokens, all_heads, size = heads.shape
    num_kv_heads, page_size = pages.shape[2:4]
    group = all_heads // num_kv_heads - 2
    pack = 1 << (group - 1).bit_length()
    strides = heads.stride()
    q = _queries(heads, (num_tokens, all_heads, size), strides, (ROWS.value // pack, pack, PANEL.value))
    if has_no_prefix:
        kv = _panels(heads, (num_tokens, all_heads * size), (strides[0], 1), (block_n, PANEL.value))
    else:
        kv = _panels(pages, (pages.numel() // size, size), (size, 1), (min(page_size, block_n), PANEL.value))
    num_items = tiles.shape[0] * num_kv_heads
    _launch_prefill(
        (min(num_items, _num_processors(heads.device)), 1, 1),
        (q, kv, page_table, tiles, out, page_table.stride(0), num_items),
        (num_kv_heads, group, size, 0 if has_no_prefix else page_size, block_n, num_stages, scale * LOG2E, in_turn),
        {"num_warps": 4, "maxnreg": MAX_REGISTERS},
    )
