"""Split the rows of a decode step into items of about equal work, on the device, and choose the compile-time configuration
of the kernels that run over them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.runtime.chip import starts_early

# int32 numbers per item. Five are used: row, begin, end, the row's first item, its number of items.
FIELDS = tl.constexpr(8)
# Chunks are multiples of this many positions, so that rounding never gives a row fewer chunks than were counted for it.
GRAIN = tl.constexpr(16)
# In positions. A shorter chunk costs more to merge than it saves.
MIN_CHUNK = 64
# Two programs for each of the 132 multiprocessors of an H200.
_PROGRAMS = 264
# Attention over a prefix is not memory-bound: about one program per multiprocessor, and no more parts to merge than needed.
_PREFIX_PROGRAMS = 128
_MAX_PREFIX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time parameters of the kernels. They change only speed."""

    tile: int = 64  # keys at a time
    num_warps: int = 4
    num_stages: int = 3
    prefix_rows: int = 64  # queries at a time over a shared prefix
    prefix_tile: int = 64
    prefix_warps: int = 4
    prefix_stages: int = 3


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The rows of one step, split into items. Valid until the next plan into the same items tensor."""

    items: torch.Tensor  # [num_items or more, FIELDS] int32; row −1: nothing to do
    num_rows: int
    num_items: int
    prefix_len: torch.Tensor | None  # [1] int32: the items skip that many first positions; None: no prefix


def num_chunks(num_rows: int, num_kv_heads: int) -> int:
    """About the largest number of chunks for a step's keys. Few rows are split into enough programs to keep the whole GPU
    reading. Rows that fill the GPU by themselves are split only if one is twice as long as the average."""
    enough = -(-_PROGRAMS // num_kv_heads)
    return num_rows // 2 if num_rows >= 3 * enough // 4 else enough


def num_prefix_splits(num_rows: int, num_heads: int, num_kv_heads: int, tile: int = 64) -> int:
    """The number of parts of a shared prefix: a power of two that gives every multiprocessor work."""
    programs = -(-num_rows * (num_heads // num_kv_heads) // tile) * num_kv_heads
    return min(_MAX_PREFIX_SPLITS, 1 << (-(-_PREFIX_PROGRAMS // programs) - 1).bit_length())


def decode_config(kv: torch.Tensor, num_rows: int) -> DecodeConfig:
    """The fastest configuration that benchmarks/kernels/paged_decode.py measured on an H200 with heads of 128, chosen by the
    bytes of one head's key at one position: larger heads get smaller tiles, to fit into shared memory."""
    row_bytes = triton.next_power_of_2(kv.shape[4]) * kv.element_size()
    if kv.element_size() == 1:
        return DecodeConfig(num_warps=2)
    if row_bytes <= 256:
        return DecodeConfig(tile=32, num_warps=2) if num_rows <= 32 else DecodeConfig(num_stages=2)
    if row_bytes <= 512:
        return DecodeConfig(prefix_stages=2)
    return DecodeConfig(tile=32, prefix_tile=32, prefix_stages=2)


def plan_rows(
    seq_lens: torch.Tensor,
    items: torch.Tensor,
    chunks: int,
    *,
    min_chunk: int = MIN_CHUNK,
    window: int = 0,
    first: int = 0,
    prefix_len: torch.Tensor | None = None,
    pdl: bool = False,
) -> DecodeWork:
    """Split rows with seq_lens [B] int32 into items. A row with more than total / chunks positions is split evenly. There
    are at most B + chunks items for any lengths, so that number of programs can be captured in a graph."""
    assert min_chunk % GRAIN.value == 0 and seq_lens.is_contiguous()
    num_rows = seq_lens.shape[0]
    num_items = num_rows + chunks
    pdl = pdl and starts_early(seq_lens.device)
    assert 0 < num_items <= items.shape[0] and items.shape[1] == FIELDS.value
    _plan_kernel[(num_rows,)](
        *(seq_lens, prefix_len, items, num_rows, num_items, chunks, min_chunk),
        WINDOW=window,
        FIRST=first,
        ROWS=max(1024, triton.next_power_of_2(num_rows)),
        PDL=pdl,
        **({"launch_pdl": True} if pdl else {}),
    )
    return DecodeWork(items, num_rows, num_items, prefix_len)


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunks", "min_chunk"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens,  # [B]
    prefix_len,  # [1] or None
    items,  # [num_items, FIELDS]
    num_rows,
    num_items,
    chunks,
    min_chunk,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: finds the index of its first item by counting the items of the rows before it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    ends = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    begins = tl.zeros_like(ends)
    if WINDOW > 0:
        begins = tl.maximum(ends - WINDOW, 0)
    if FIRST > 0:
        begins = tl.minimum(tl.maximum(begins, FIRST), ends)
    if prefix_len is not None:
        begins = tl.minimum(ends, tl.load(prefix_len))
    keys = ends - begins
    chunk = tl.cdiv(tl.cdiv(tl.sum(keys), chunks), GRAIN) * GRAIN
    chunk = tl.maximum(chunk, min_chunk)
    counts = tl.where(rows < num_rows, tl.maximum(tl.cdiv(keys, chunk), 1), 0)
    first = tl.sum(tl.where(rows < row, counts, 0))
    count = tl.sum(tl.where(rows == row, counts, 0))
    begin = tl.sum(tl.where(rows == row, begins, 0))
    end = tl.sum(tl.where(rows == row, ends, 0))
    share = tl.cdiv(tl.cdiv(end - begin, count), GRAIN) * GRAIN  # positions per item, evenly
    for start in range(0, count, 64):
        part = start + tl.arange(0, 64)
        item = items + (first + part) * FIELDS
        is_item = part < count
        tl.store(item, row, mask=is_item)
        tl.store(item + 1, begin + part * share, mask=is_item)
        tl.store(item + 2, tl.minimum(begin + (part + 1) * share, end), mask=is_item)
        tl.store(item + 3, first, mask=is_item)
        tl.store(item + 4, count, mask=is_item)
    if row == num_rows - 1:
        for start in range(first + count, num_items, 64):
            rest = start + tl.arange(0, 64)
            tl.store(items + rest * FIELDS, -1, mask=rest < num_items)
