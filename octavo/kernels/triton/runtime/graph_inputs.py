"""Build a decode step's inputs from the rows' tables on the GPU, and write its tokens back. The host sends only rows and
lengths.

Host and GPU exchange data through pinned memory: a ring of input slots, each read once, in order, by a kernel of its step,
and a ring of sampled tokens. For so few bytes, two copies per step by the copy engine would cost more."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.gemm.adapters import BLOCK_FIELDS

_PAGES_AT_ONCE = 512
_CELLS_AT_ONCE = 256

NUM_SLOTS = 16
"""Input slots in the ring. The host must not fill a slot before its previous contents were read."""


@dataclass(frozen=True, slots=True)
class InputSlot:
    """Offsets in an input slot of int32 numbers, for steps of at most `max_rows` rows. Rows are at 0."""

    max_rows: int
    max_changes: int  # page-table entries that may change before a step

    @property
    def lens(self) -> int:
        return self.max_rows

    @property
    def prefix_len(self) -> int:
        return 2 * self.max_rows

    @property
    def num_changes(self) -> int:
        return 2 * self.max_rows + 1

    @property
    def cells(self) -> int:
        """Cells of the flattened page tables that change before the step …"""
        return 2 * self.max_rows + 4

    @property
    def pages(self) -> int:
        """… and their new pages."""
        return self.cells + self.max_changes

    @property
    def given(self) -> int:
        """For each row NO_INPUT, or a drafted token to be written to the token table as the one that is computed."""
        return self.pages + self.max_changes

    @property
    def size(self) -> int:
        return self.given + self.max_rows


@triton.jit
def _receive(
    input_slots, slot, rows, lens, given, prefix_len, page_table, num_rows, size, max_rows, max_changes,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy an input slot. One program: a slot has a few kilobytes, and reading it takes one round trip to host memory."""
    which = tl.load(slot)
    inputs = input_slots + which * size
    for first in range(0, num_rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(rows + at, tl.load(inputs + at, mask=at < num_rows, other=0), mask=at < num_rows)
        tl.store(lens + at, tl.load(inputs + max_rows + at, mask=at < num_rows, other=0), mask=at < num_rows)
        drafted = tl.load(inputs + 2 * max_rows + 4 + 2 * max_changes + at, mask=at < num_rows, other=0)
        tl.store(given + at, drafted, mask=at < num_rows)
    tl.store(prefix_len, tl.load(inputs + 2 * max_rows))
    num_changes = tl.load(inputs + 2 * max_rows + 1)
    for first in range(0, num_changes, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_change = at < num_changes
        cell = tl.load(inputs + 2 * max_rows + 4 + at, mask=is_change, other=0)
        page = tl.load(inputs + 2 * max_rows + 4 + max_changes + at, mask=is_change, other=0)
        tl.store(page_table + cell, page, mask=is_change)
    tl.store(slot, (which + 1) % SLOTS)


@triton.jit(do_not_specialize=["num_rows", "max_rows"])
def _receive_adapters(
    order_slots, block_slots, slot, order, blocks, num_rows, max_rows, FIELDS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    which = (tl.load(slot) + SLOTS - 1) % SLOTS  # receive() has moved it on
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = order_slots + which * max_rows
    tl.store(order + at, tl.load(source + at, mask=at < num_rows, other=0), mask=at < num_rows)
    source = block_slots + which * max_rows * FIELDS
    is_field = at < num_rows * FIELDS
    tl.store(blocks + at, tl.load(source + at, mask=is_field, other=0), mask=is_field)


@triton.jit
def _gather(
    rows, lens, given, tokens, pages, input_ids, positions, slots, seq_lens, page_table, tokens_width, pages_width, out_width,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    length = tl.load(lens + index)
    is_there = length > 0
    row = tl.load(rows + index)
    row = tl.where(is_there, tl.where(row < 0, -1 - row, row), 0).to(tl.int64)
    position = tl.maximum(length - 1, 0)
    drafted = tl.load(given + index)
    is_drafted = is_there & (drafted >= 0)
    token = tl.where(is_drafted, drafted, tl.load(tokens + row * tokens_width + position))
    tl.store(tokens + row * tokens_width + position, drafted, mask=is_drafted)
    page = tl.load(pages + row * pages_width + position // PAGE_SIZE).to(tl.int64)
    tl.store(input_ids + index, tl.where(is_there, token, 0).to(tl.int64))
    tl.store(positions + index, position.to(tl.int64))
    tl.store(slots + index, tl.where(is_there, page * PAGE_SIZE + position % PAGE_SIZE, -1))
    tl.store(seq_lens + index, length)
    for first in range(0, tl.cdiv(length, PAGE_SIZE), BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_used = at * PAGE_SIZE < length
        numbers = tl.load(pages + row * pages_width + at, mask=is_used, other=0)
        tl.store(page_table + index.to(tl.int64) * out_width + at, numbers, mask=is_used)


@triton.jit
def _scatter(rows, lens, sampled, tokens, host_tokens, slot, tokens_width, max_rows, SLOTS: tl.constexpr):
    index = tl.program_id(0)
    length = tl.load(lens + index)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(sampled + index).to(tl.int32)
    tl.store(tokens + row * tokens_width + length, token, mask=(length > 0) & (row >= 0))
    # receive() has moved `slot` on: this step's slot is the previous one.
    which = (tl.load(slot) + SLOTS - 1) % SLOTS
    tl.store(host_tokens + which * max_rows + index, token)


def receive(
    input_slots: torch.Tensor,  # [NUM_SLOTS, InputSlot.size] int32, pinned
    slot: torch.Tensor,  # [1] int32: index of the slot to read; incremented
    rows: torch.Tensor,  # [B] int32; this and the following are filled
    lens: torch.Tensor,  # [B] int32
    given: torch.Tensor,  # [B] int32
    prefix_len: torch.Tensor,  # [1] int32
    pages: torch.Tensor,  # [rows, P] int32, or several of these in a row: gets the changes
    layout: InputSlot,
) -> None:
    _receive[(1,)](
        input_slots, slot, rows, lens, given, prefix_len, pages, rows.shape[0], input_slots.shape[1], layout.max_rows, layout.max_changes,
        SLOTS=NUM_SLOTS, BLOCK=_CELLS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def receive_adapters(
    order_slots: torch.Tensor,  # [NUM_SLOTS, max_rows] int32, pinned
    block_slots: torch.Tensor,  # [NUM_SLOTS, max_rows, BLOCK_FIELDS] int64, pinned
    slot: torch.Tensor,  # [1] int32, as left by receive()
    order: torch.Tensor,  # [B] int32; this and the following are filled
    blocks: torch.Tensor,  # [B, BLOCK_FIELDS] int64
) -> None:
    """Copy which rows have which adapter (gemm/adapters.py)."""
    _receive_adapters[(-(-blocks.numel() // _CELLS_AT_ONCE),)](
        order_slots, block_slots, slot, order, blocks, blocks.shape[0], block_slots.shape[1],
        FIELDS=BLOCK_FIELDS, SLOTS=NUM_SLOTS, BLOCK=_CELLS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def gather_inputs(
    rows: torch.Tensor,  # [B] int32; −1 − row: its sample is not kept (scatter_tokens)
    lens: torch.Tensor,  # [B] int32: tokens in the row, of which the last is to be computed; 0: padding
    given: torch.Tensor,  # [B] int32: that last token, to be written to the table; negative: it is there
    tokens: torch.Tensor,  # [rows, W] int32
    pages: torch.Tensor,  # [rows, P] int32
    page_size: int,
    *,
    input_ids: torch.Tensor,  # [B] int64; this and the following are filled
    positions: torch.Tensor,  # [B] int64
    slots: torch.Tensor,  # [B] int64; −1 for padding
    seq_lens: torch.Tensor,  # [B] int32
    page_table: torch.Tensor,  # [B, P] int32; entries beyond a row's length are not changed
) -> None:
    _gather[(rows.shape[0],)](
        rows, lens, given, tokens, pages, input_ids, positions, slots, seq_lens, page_table,
        tokens.stride(0), pages.stride(0), page_table.stride(0), PAGE_SIZE=page_size, BLOCK=_PAGES_AT_ONCE, num_warps=1,
    )  # fmt: skip


def scatter_tokens(
    rows: torch.Tensor,  # [B] int32
    lens: torch.Tensor,  # [B] int32
    sampled: torch.Tensor,  # [B] int64
    tokens: torch.Tensor,  # [rows, W] int32: each row's sampled token is appended, unless `rows` has −1 − row
    host_tokens: torch.Tensor,  # [NUM_SLOTS, max_rows] int32, pinned: … and sent to the host
    slot: torch.Tensor,  # [1] int32, as left by receive()
) -> None:
    _scatter[(rows.shape[0],)](
        rows,
        lens,
        sampled,
        tokens,
        host_tokens,
        slot,
        tokens.stride(0),
        host_tokens.stride(0),
        SLOTS=NUM_SLOTS,
        num_warps=1,
    )
