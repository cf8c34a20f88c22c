"""A decode step's inputs from the rows' tables, and its tokens back into them, on the GPU: the host sends rows and lengths.
Knows nothing of requests or models."""

import torch
import triton
import triton.language as tl

_PAGES_AT_ONCE = 512


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
def _scatter(rows, lens, sampled, tokens, tokens_width):
    index = tl.program_id(0)
    length = tl.load(lens + index)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(sampled + index).to(tl.int32)
    tl.store(tokens + row * tokens_width + length, token, mask=length > 0)


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


def scatter_tokens(rows: torch.Tensor, lens: torch.Tensor, sampled: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put each row's sampled token [B] behind the tokens it holds."""
    _scatter[(rows.shape[0],)](rows, lens, sampled, tokens, tokens.stride(0), num_warps=1)
