"""A decode step's inputs from the rows' tables, and its tokens back into them, on the GPU: the host sends rows and lengths.
Knows nothing of requests or models.

Host and GPU meet in pinned memory: a ring of letters, each read once, in order, by a kernel of the step it is for, and a
ring of answers. A copy by the copy engine would cost more than the few bytes are worth, twice a step."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_PAGES_AT_ONCE = 512
_CELLS_AT_ONCE = 256

NUM_SLOTS = 4
"""Letters on their way at most; whoever writes one makes sure that the one before it in its slot was read."""


@dataclass(frozen=True, slots=True)
class InputSlot:
    """Where things are in a letter of int32 numbers, for steps of at most `max_rows` rows."""

    max_rows: int
    max_changes: int  # entries of page tables that may change before a step

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
        """Of the flattened page tables: those that change before the step …"""
        return 2 * self.max_rows + 4

    @property
    def pages(self) -> int:
        """… and what they become."""
        return self.cells + self.max_changes

    @property
    def size(self) -> int:
        return self.pages + self.max_changes


@triton.jit
def _receive(
    letters, slot, rows, lens, prefix_len, page_table, num_rows, size, max_rows, max_changes,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a letter is a few kilobytes, and reading it takes one trip to the host's memory and back."""
    which = tl.load(slot)
    letter = letters + which * size
    for first in range(0, num_rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(rows + at, tl.load(letter + at, mask=at < num_rows, other=0), mask=at < num_rows)
        tl.store(lens + at, tl.load(letter + max_rows + at, mask=at < num_rows, other=0), mask=at < num_rows)
    tl.store(prefix_len, tl.load(letter + 2 * max_rows))
    num_changes = tl.load(letter + 2 * max_rows + 1)
    for first in range(0, num_changes, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_change = at < num_changes
        cell = tl.load(letter + 2 * max_rows + 4 + at, mask=is_change, other=0)
        page = tl.load(letter + 2 * max_rows + 4 + max_changes + at, mask=is_change, other=0)
        tl.store(page_table + cell, page, mask=is_change)
    tl.store(slot, (which + 1) % SLOTS)


@triton.jit
def _gather(
    rows, lens, tokens, pages, input_ids, positions, slots, seq_lens, page_table, tokens_width, pages_width, out_width,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    length = tl.load(lens + index)
    is_there = length > 0
    row = tl.where(is_there, tl.load(rows + index), 0).to(tl.int64)
    position = tl.maximum(length - 1, 0)
    token = tl.load(tokens + row * tokens_width + position)
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
def _scatter(rows, lens, sampled, tokens, answers, slot, tokens_width, max_rows, SLOTS: tl.constexpr):
    index = tl.program_id(0)
    length = tl.load(lens + index)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(sampled + index).to(tl.int32)
    tl.store(tokens + row * tokens_width + length, token, mask=length > 0)
    # The step's letter was the one before the next.
    which = (tl.load(slot) + SLOTS - 1) % SLOTS
    tl.store(answers + which * max_rows + index, token)


def receive(
    letters: torch.Tensor,  # [NUM_SLOTS, Letter.size] int32, pinned
    slot: torch.Tensor,  # [1] int32: which letter is next; moved on
    rows: torch.Tensor,  # [B] int32, filled, as all below
    lens: torch.Tensor,  # [B] int32
    prefix_len: torch.Tensor,  # [1] int32
    pages: torch.Tensor,  # [rows, P] int32, or several of these behind each other: the changes are made
    layout: InputSlot,
) -> None:
    _receive[(1,)](
        letters, slot, rows, lens, prefix_len, pages, rows.shape[0], letters.shape[1], layout.max_rows, layout.max_changes,
        SLOTS=NUM_SLOTS, BLOCK=_CELLS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def gather_inputs(
    rows: torch.Tensor,  # [B] int32
    lens: torch.Tensor,  # [B] int32: tokens the row holds, the last of them to be computed; 0: padding
    tokens: torch.Tensor,  # [rows, W] int32
    pages: torch.Tensor,  # [rows, P] int32
    page_size: int,
    *,
    input_ids: torch.Tensor,  # [B] int64, filled, as all below
    positions: torch.Tensor,  # [B] int64
    slots: torch.Tensor,  # [B] int64; −1 for padding
    seq_lens: torch.Tensor,  # [B] int32
    page_table: torch.Tensor,  # [B, P] int32; what lies beyond a row's length is left as it is
) -> None:
    _gather[(rows.shape[0],)](
        rows, lens, tokens, pages, input_ids, positions, slots, seq_lens, page_table,
        tokens.stride(0), pages.stride(0), page_table.stride(0), PAGE_SIZE=page_size, BLOCK=_PAGES_AT_ONCE, num_warps=1,
    )  # fmt: skip


def scatter_tokens(
    rows: torch.Tensor,  # [B] int32
    lens: torch.Tensor,  # [B] int32
    sampled: torch.Tensor,  # [B] int64
    tokens: torch.Tensor,  # [rows, W] int32: each row's sampled token goes behind those it holds
    answers: torch.Tensor,  # [NUM_SLOTS, max_rows] int32, pinned: … and home
    slot: torch.Tensor,  # [1] int32, as receive() left it
) -> None:
    _scatter[(rows.shape[0],)](
        rows, lens, sampled, tokens, answers, slot, tokens.stride(0), answers.stride(0), SLOTS=NUM_SLOTS, num_warps=1
    )
