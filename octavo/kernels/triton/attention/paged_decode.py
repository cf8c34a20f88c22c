"""Attention of decode rows, one query token each, over KV pages. A decode step spends most of its time here. The host never
waits for the device.

A step is planned once, on the device: rows are split into chunks of about equal work, and each chunk is one item of a list
whose length depends only on the number of rows. So one captured graph serves all lengths, one long row among short ones is
spread over the GPU, and a row of one chunk needs no merging. Each layer then runs one kernel over the items; the last program
to finish a row's chunks merges them.

If all rows begin with the same pages, a kernel before it attends to those once for all rows, as a matrix product."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention.decode_plan import (
    FIELDS,
    MIN_CHUNK,
    DecodeConfig,
    DecodeWork,
    decode_config,
    num_chunks,
    num_prefix_splits,
    plan_rows,
)
from octavo.kernels.triton.attention.merge import fold, join, with_sinks
from octavo.kernels.triton.runtime.chip import starts_early


@triton.jit
def _pages(table, position, end, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The page of each position before `end`; 0 beyond it, which is never read."""
    return tl.load(table + position // PAGE, mask=position < end, other=0)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,  # [M, D_PADDED]
    page,  # [TILE] pages of the first positions: the caller loads them before it waits for q
    keys,  # points to this head's keys in page 0
    table,  # the row's pages
    begin,
    end,
    page_stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Running softmax over positions begin … end − 1 → weighted values [M, D_PADDED], largest exponent (base 2) and sum of
    powers [M]. Nothing is read outside these positions. Without positions: 0, -inf, 0."""
    M: tl.constexpr = q.shape[0]
    D_PADDED: tl.constexpr = q.shape[1]
    LOG2E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, D_PADDED)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    # With few rows the warps share a row's keys: sum the powers once at the end, not across warps in each iteration.
    SUM_LATE: tl.constexpr = M <= 16
    total = tl.zeros([M, TILE] if SUM_LATE else [M], tl.float32)
    # Page numbers are loaded one tile ahead, into registers: in the tile's own iteration the compiler would spend pipeline
    # stages on that load, and keys and values would have a single buffer.
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_inside = position < end
        cell = page.to(tl.int64) * page_stride + (position % PAGE) * D
        place = keys + cell[:, None] + dims[None, :]  # [TILE, D_PADDED]
        mask = is_inside[:, None]
        if D != D_PADDED:
            mask = mask & (dims < D)[None, :]
        page = _pages(table, position + TILE, end, PAGE)
        k = tl.load(place, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, TILE]
        if SOFTCAP > 0:
            # cap * tanh(score / cap) by exp2: exact at both ends, where the power is 0 or infinite.
            scores = SOFTCAP * LOG2E * (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2E * SCALE / SOFTCAP))))
        else:
            scores = scores * (SCALE * LOG2E)
        scores = tl.where(is_inside[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        keep = tl.exp2(largest - higher)
        if SUM_LATE:
            total = total * keep[:, None] + weights
        else:
            total = total * keep + tl.sum(weights, axis=1)
        v = tl.load(place + NUM_KV_HEADS * PAGE * D, mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
        largest = higher
    if SUM_LATE:
        total = tl.sum(total, axis=1)
    return acc, largest, total


@triton.jit
def _matching(q, kv):  # type: ignore[no-untyped-def]
    """q in the type of the products. 8-bit keys convert to float16 in one instruction and to bfloat16 in several, and
    float16 holds them exactly. Queries beyond its range do not occur in practice; the clamp keeps them finite."""
    if kv.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def _prefix_share(prefix_len, num_splits, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions of the shared prefix per split."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix_len, num_splits), TILE) * TILE, TILE)


@triton.jit(do_not_specialize=["num_rows"])
def _prefix_kernel(  # type: ignore[no-untyped-def]
    q,
    kv,
    page_table,
    prefix_len,  # [1]
    prefix_out,  # [splits, B, H, D] float32
    prefix_lse,  # [splits, B, H] float32
    num_rows,
    q_stride,
    page_stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """QUERIES queries of one KV head, from consecutive rows, over one split of the prefix that all rows share."""
    if PDL:
        # In this order: when the decode kernel starts, all work before this kernel is complete, so it need not wait for it.
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(prefix_len)
    share = _prefix_share(length, tl.num_programs(2), TILE)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if begin >= end:
        return
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    row = query // GROUP
    heads = head * GROUP + query % GROUP
    dims = tl.arange(0, D_PADDED)
    mask = (row < num_rows)[:, None] & (dims < D)[None, :]
    page = _pages(page_table, begin + tl.arange(0, TILE), end, PAGE)
    q_tile = tl.load(q + (row * q_stride + heads * D)[:, None] + dims[None, :], mask=mask, other=0.0)
    acc, largest, total = _attend(
        *(_matching(q_tile, kv), page, kv + head * PAGE * D, page_table, begin, end, page_stride),
        *(SCALE, SOFTCAP, NUM_KV_HEADS, D, PAGE, TILE),
    )
    place = (split * num_rows + row) * (NUM_KV_HEADS * GROUP) + heads
    tl.store(prefix_out + place[:, None] * D + dims[None, :], acc / total[:, None], mask=mask)
    tl.store(prefix_lse + place, largest + tl.log2(total), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_prefix_splits", "table_stride"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [B, H, D], rows q_stride apart
    kv,  # [pages, 2, Hkv, PAGE, D], pages page_stride apart
    page_table,  # [B, M], rows table_stride apart
    items,  # [num_items, FIELDS]
    out,  # [B, H * D], rows out_stride apart
    partial_out,  # [num_items, H, D] float32
    partial_lse,  # [num_items, H] float32
    arrived,  # [B, Hkv] int32: finished chunks of the row; 0 before and after the launch
    prefix_len,  # [1] or None
    prefix_out,
    prefix_lse,
    sinks,  # [H] float32 or None
    num_rows,
    num_prefix_splits,
    q_stride,
    page_stride,
    table_stride,
    out_stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The GROUP query heads of one KV head over one item; the last item of a row to finish merges all of them."""
    if PDL:
        if prefix_len is None:
            gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    first = tl.load(item + 3)
    count = tl.load(item + 4)
    if row < 0:
        return
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, D_PADDED)
    heads = head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < D)[None, :]
    table = page_table + row * table_stride
    page = _pages(table, begin + tl.arange(0, TILE), end, PAGE)
    # .cg bypasses the L1 cache: after a prefix kernel there was no wait that would have invalidated older queries in it.
    place = q + row * q_stride + heads[:, None] * D + dims[None, :]
    q_tile = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    acc, largest, total = _attend(
        *(_matching(q_tile, kv), page, kv + head * PAGE * D, table, begin, end, page_stride),
        *(SCALE, SOFTCAP, NUM_KV_HEADS, D, PAGE, TILE),
    )
    if prefix_len is not None:
        if PDL:
            gdc_wait()
        length = tl.load(prefix_len)
        # The row's first chunk folds in the prefix. A padding row begins at 0 and folds in nothing.
        used = tl.cdiv(length, _prefix_share(length, num_prefix_splits, PREFIX_TILE))
        for split in range(tl.where(begin == length, used, 0)):
            slot = (split * num_rows + row) * NUM_HEADS + heads
            part = tl.load(prefix_out + slot[:, None] * D + dims[None, :], mask=mask, other=0.0)
            part_lse = tl.load(prefix_lse + slot, mask=group < GROUP, other=0.0)
            acc, largest, total = fold(acc, largest, total, part, part_lse)
    if sinks is not None:  # for a row of several items, the merge adds the sinks once
        total = tl.where(count == 1, with_sinks(largest, total, sinks + heads, group < GROUP), total)
    result = acc / tl.where(total == 0, 1, total)[:, None]  # zeros for a padding row, which has no keys
    if count == 1:
        cells = out + row * out_stride + heads[:, None] * D + dims[None, :]
        tl.store(cells, result.to(out.dtype.element_ty), mask=mask)
    else:
        mine = tl.program_id(1) * NUM_HEADS + heads
        tl.store(partial_out + mine[:, None] * D + dims[None, :], result, mask=mask)
        tl.store(partial_lse + mine, largest + tl.log2(total), mask=group < GROUP)
        # All threads have stored. The atomic add publishes the stores to the last program, and acquires those of the others.
        tl.debug_barrier()
        counter = arrived + row * NUM_KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(counter, 0)
            target = out + row * out_stride + head * GROUP * D
            join(
                *(partial_out, partial_lse, first, count, target, sinks, head * GROUP),
                *(NUM_HEADS, GROUP, D, D_PADDED, PARTS),
            )


class DecodeAttention:
    """Scratch memory and launches for decode rows. One instance serves all layers, one launch after another; two streams
    must not share it. Everything that a captured graph refers to is allocated once and never moves."""

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
        max_chunks: int = 0,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        self._max_rows = max_rows
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._device = device
        most = max(num_chunks(1, num_kv_heads), num_chunks(max_rows, num_kv_heads))
        self._max_items = max_rows + max(max_chunks, most)
        self._partial_out = self._scratch(self._max_items, num_heads, head_size)
        self._partial_lse = self._scratch(self._max_items, num_heads)
        self._arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        self._items: dict[tuple[int, int], torch.Tensor] = {}  # by window and first position
        self._prefix: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(
        self,
        seq_lens: torch.Tensor,
        *,
        window: int = 0,
        first: int = 0,
        prefix_len: torch.Tensor | None = None,
        chunks: int = 0,
        min_chunk: int = MIN_CHUNK,
        pdl: bool = False,
    ) -> DecodeWork:
        """Split rows with seq_lens [B] int32 (0: padding) into items: once per step for each window size of the layers.

        window: only the last `window` positions count, the token's own included; 0: all. first: positions before it do not count, and a row
        that has no others gets zeros. prefix_len [1] int32, a multiple
        of the page size: every row that is not padding begins with the same pages for that many tokens; 0 on the device: no
        prefix. A captured graph fixes the number of rows, the chunks and whether prefix_len is given, but not the lengths."""
        assert not (window and prefix_len is not None), "a shared prefix is not supported under a sliding window"
        assert not (first and prefix_len is not None), "a shared prefix is read from position 0 on"
        assert seq_lens.shape[0] <= self._max_rows
        if (window, first) not in self._items:
            shape = (self._max_items, FIELDS.value)
            self._items[window, first] = torch.empty(shape, dtype=torch.int32, device=self._device)
        chunks = chunks or num_chunks(seq_lens.shape[0], self._num_kv_heads)
        return plan_rows(
            *(seq_lens, self._items[window, first], chunks),
            min_chunk=min_chunk,
            window=window,
            first=first,
            prefix_len=prefix_len,
            pdl=pdl,
        )

    def run(
        self,
        work: DecodeWork,
        q: torch.Tensor,
        kv: torch.Tensor,
        page_table: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        config: DecodeConfig | None = None,
        prefix_splits: int = 0,
        pdl: bool = False,
    ) -> None:
        """Attend with q [B, H, D] (any row stride) over kv [pages, 2, Hkv, page_size, D] by page_table [B, M] int32 → out
        [B, H * D].

        The step's keys and values are already in kv. softcap: softcap * tanh(score / softcap); 0: none.
        sinks [H] float32: per head, one more score in the softmax, without a value."""
        num_rows, num_heads, head_size = q.shape
        assert (num_rows, num_heads, head_size) == (work.num_rows, self._num_heads, self._head_size)
        assert kv.shape[1:3] == (2, self._num_kv_heads) and kv.shape[4] == head_size and kv[0].is_contiguous()
        assert q.stride()[1:] == (head_size, 1) and page_table.stride(1) == 1 and out.stride(1) == 1
        config = config or decode_config(kv, num_rows)
        pdl = pdl and starts_early(q.device)
        shared = self._shared(kv, scale, softcap)
        prefix: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if work.prefix_len is not None:
            prefix_splits = prefix_splits or self._prefix_splits(num_rows, config)
            prefix = self._run_prefix(work, q, kv, page_table, prefix_splits, config, shared, pdl)
        group = triton.next_power_of_2(num_heads // self._num_kv_heads)
        _decode_kernel[(self._num_kv_heads, work.num_items)](
            *(q, kv, page_table, work.items, out, self._partial_out, self._partial_lse, self._arrived),
            *(work.prefix_len, *prefix, sinks, num_rows, prefix_splits),
            *(q.stride(0), kv.stride(0), page_table.stride(0), out.stride(0)),
            **shared,
            GROUP_PADDED=max(16, group),
            TILE=config.tile,
            PREFIX_TILE=config.prefix_tile,
            PARTS=max(1, 1024 * config.num_warps // (shared["D_PADDED"] * group)),  # 32 registers per thread
            **_launch_options(config.num_warps, config.num_stages, pdl),
        )

    def _run_prefix(
        self,
        work: DecodeWork,
        q: torch.Tensor,
        kv: torch.Tensor,
        page_table: torch.Tensor,
        splits: int,
        config: DecodeConfig,
        shared: dict[str, Any],
        pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the shared prefix, in parts: outputs [splits, B, H, D] and lse [splits, B, H]."""
        num_rows, num_heads, head_size = q.shape
        if self._prefix is None:
            slots = max(rows * self._prefix_splits(rows, config) for rows in range(1, self._max_rows + 1))
            slots = max(slots, num_rows * splits)
            self._prefix = self._scratch(slots, num_heads, head_size), self._scratch(slots, num_heads)
        assert num_rows * splits <= self._prefix[0].shape[0]
        num_tiles = triton.cdiv(num_rows * shared["GROUP"], config.prefix_rows)
        _prefix_kernel[(num_tiles, self._num_kv_heads, splits)](
            *(q, kv, page_table, work.prefix_len, *self._prefix, num_rows, q.stride(0), kv.stride(0)),
            **shared,
            QUERIES=config.prefix_rows,
            TILE=config.prefix_tile,
            **_launch_options(config.prefix_warps, config.prefix_stages, pdl),
        )
        return self._prefix

    def _shared(self, kv: torch.Tensor, scale: float, softcap: float) -> dict[str, Any]:
        """Compile-time constants of both kernels."""
        return {
            "SCALE": scale,
            "SOFTCAP": softcap,
            "NUM_KV_HEADS": self._num_kv_heads,
            "GROUP": self._num_heads // self._num_kv_heads,
            "D": self._head_size,
            "D_PADDED": max(16, triton.next_power_of_2(self._head_size)),
            "PAGE": kv.shape[3],
        }

    def _prefix_splits(self, num_rows: int, config: DecodeConfig) -> int:
        return num_prefix_splits(num_rows, self._num_heads, self._num_kv_heads, config.prefix_rows)

    def _scratch(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)


def _launch_options(num_warps: int, num_stages: int, pdl: bool) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages, "PDL": pdl}
    return {**options, "launch_pdl": True} if pdl else options
