"""Batch: one step as tensors. T tokens of B rows, S of them sampled.
Knows nothing of requests, scheduling or models."""

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: (
        torch.Tensor
    )  # [T] int64: where each token's K and V are written = page * page_size + position % page_size; −1: nowhere
    query_start: torch.Tensor  # [B + 1] int32: row b's tokens are query_start[b] … query_start[b + 1] − 1
    seq_lens: torch.Tensor  # [B] int32: tokens in the KV store once this step's are written; 0: a row of padding
    page_table: torch.Tensor  # [B, M] int32: M pages are enough for the longest row; unused entries are 0
    sample_at: torch.Tensor  # [S] int64: indices into T
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # rows 0 … num_decodes − 1 have exactly one token each (the assembler sorts them first)
    query_lens_host: list[int]  # [B] the same numbers on the host, for backends that loop; a captured step has none
    seq_lens_host: list[int]  # [B]
    prefix_len: torch.Tensor | None = (
        None  # [1] int32: leading tokens that all decode rows share through the same pages
    )
    # Where layers have page tables of their own by group: this batch with each group's slots and page table, which lie
    # behind each other in memory, this batch's own being the first. Empty: one serves all layers.
    groups: "tuple[Batch, ...]" = ()

    def in_groups(self, slots: torch.Tensor, page_tables: torch.Tensor) -> "Batch":
        """With slots [G, T] and page tables [G, B, M], of which this batch has the first."""
        assert slots.is_contiguous() and page_tables.stride(2) == 1
        pairs = zip(slots, page_tables, strict=True)
        parts = tuple(dataclasses.replace(self, slots=own, page_table=table) for own, table in pairs)
        return dataclasses.replace(parts[0], groups=parts)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]
