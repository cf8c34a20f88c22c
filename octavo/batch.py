"""Batch: one step as tensors. T tokens of B rows; S of the tokens are sampled from."""

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    # [T] int64: where each token's K and V are written: page * page_size + position % page_size; −1: not written
    slots: torch.Tensor
    query_start: torch.Tensor  # [B + 1] int32: row b's tokens are query_start[b] … query_start[b + 1] − 1
    seq_lens: torch.Tensor  # [B] int32: tokens in the KV store after this step's are written; 0: a padding row
    page_table: torch.Tensor  # [B, M] int32: M pages are enough for the longest row; unused entries are 0
    sample_at: torch.Tensor  # [S] int64: indices into T
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # rows 0 … num_decodes − 1 have exactly one token each (the assembler sorts them first)
    query_lens_host: list[int]  # [B] query lengths on the host, for backends that loop; empty in a captured step
    seq_lens_host: list[int]  # [B] seq_lens on the host; empty in a captured step
    # [1] int32: leading tokens that all decode rows share through the same pages
    prefix_len: torch.Tensor | None = None
    # [T] int32: index of each token's adapter in `adapters`, −1: it has none. None: no token has one.
    adapter_of: torch.Tensor | None = None
    adapters: tuple[str, ...] = ()  # ids
    # [T] bool: tokens of the second text of a pair. None: no row has a pair.
    is_second: torch.Tensor | None = None
    # One batch per group of layers when groups have their own page tables: a copy of this batch with the group's slots and
    # page table. The groups' tensors are consecutive in memory, and this batch uses the first group's. Empty: one page
    # table serves all layers.
    groups: "tuple[Batch, ...]" = ()

    def in_groups(self, slots: torch.Tensor, page_tables: torch.Tensor) -> "Batch":
        """Return a copy with slots [G, T] and page tables [G, B, M]; the copy itself uses group 0's."""
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
