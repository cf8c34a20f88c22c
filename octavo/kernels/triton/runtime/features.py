"""Features of a draft head in a captured step: read from the pages of the position before, and written to the pages of their own."""

import torch
import triton
import triton.language as tl

_NUMBERS_AT_ONCE = 1024


@triton.jit
def _before(
    rows, lens, pages, store, out, pages_width, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens + index)
    has_before = length > 1
    row = tl.load(rows + index)
    row = tl.where(has_before, tl.where(row < 0, -1 - row, row), 0).to(tl.int64)
    position = tl.maximum(length - 2, 0)
    page = tl.load(pages + row * pages_width + position // PAGE_SIZE).to(tl.int64)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    feature = tl.load(store + slot * WIDTH + at, mask=has_before & (at < WIDTH), other=0.0)
    tl.store(out + index.to(tl.int64) * WIDTH + at, feature, mask=at < WIDTH)


@triton.jit
def _keep(features, slots, rows, store, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + index)
    is_kept = slot >= 0
    if rows is not None:
        is_kept = is_kept & (tl.load(rows + index) >= 0)
    feature = tl.load(features + index.to(tl.int64) * WIDTH + at, mask=at < WIDTH, other=0.0)
    tl.store(store + slot * WIDTH + at, feature.to(store.dtype.element_ty), mask=is_kept & (at < WIDTH))


def features_before(
    rows: torch.Tensor,  # [B] int32; −1 − row is the same row
    lens: torch.Tensor,  # [B] int32: tokens in the row, of which the last is to be computed; 0: padding
    pages: torch.Tensor,  # [rows, P] int32
    page_size: int,
    store: torch.Tensor,  # [slots, D]
    out: torch.Tensor,  # [B, D], filled: for each token the feature of the position before; zeros where there is none
) -> None:
    width = store.shape[1]
    assert store.is_contiguous() and out.is_contiguous() and out.shape == (rows.shape[0], width)
    _before[(rows.shape[0], -(-width // _NUMBERS_AT_ONCE))](
        rows, lens, pages, store, out, pages.stride(0), WIDTH=width, PAGE_SIZE=page_size, BLOCK=_NUMBERS_AT_ONCE, num_warps=4
    )  # fmt: skip


def keep_features(
    features: torch.Tensor,  # [B, D]
    slots: torch.Tensor,  # [B] int64; −1: padding, whose feature is not kept
    store: torch.Tensor,  # [slots, D]
    rows: torch.Tensor | None = None,  # [B] int32; where it is −1 − row, the feature is not kept; None: each is
) -> None:
    num_tokens, width = features.shape
    assert store.is_contiguous() and features.is_contiguous() and store.shape[1] == width
    _keep[(num_tokens, -(-width // _NUMBERS_AT_ONCE))](
        features, slots, rows, store, WIDTH=width, BLOCK=_NUMBERS_AT_ONCE, num_warps=4
    )  # fmt: skip
