"""Attention on GPUs with --deterministic: one kernel for decode and prefill, whose results depend, bit for bit, only on a
row's own cells. The kernel is in kernels/triton/attention/invariant.py."""

import torch

from octavo.attention.base import LayerHeads
from octavo.attention.triton import TritonAttention, on_device
from octavo.batch import Batch
from octavo.kernels.triton.attention.invariant import InvariantAttention, choose_tile, decode_tiles
from octavo.kernels.triton.attention.paged_prefill import plan_tiles


class InvariantTritonAttention(TritonAttention):
    """TritonAttention with one order of sums. Prompts are always read back from their pages, and each row reads a shared
    prefix itself: another way would sum in another order."""

    is_fixed = True

    def __init__(self) -> None:
        super().__init__()
        self._kernel: InvariantAttention | None = None
        # Of the planned step.
        self._decode_tiles: torch.Tensor | None = None
        self._long_tiles: torch.Tensor | None = None

    def plan(self, batch: Batch) -> None:
        self._has_no_prefix = False
        self._decode_tiles = self._long_tiles = None

    def _attend_decodes(
        self, layer: LayerHeads, heads: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, batch: Batch
    ) -> None:
        if self._decode_tiles is None:
            self._decode_tiles = decode_tiles(batch.seq_lens[: batch.num_decodes])
        self._attend(layer, heads, kv, out, batch, self._decode_tiles, is_decode=True)

    def _attend_long(
        self,
        layer: LayerHeads,
        heads: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        has_no_prefix: bool,
    ) -> None:
        if self._long_tiles is None:
            tokens = choose_tile(layer.head_size, heads.dtype).tokens(layer.num_heads // layer.num_kv_heads)
            plan = plan_tiles(batch.query_lens_host, batch.seq_lens_host, batch.num_decodes, tokens)
            self._long_tiles = on_device(plan, heads.device)
        self._attend(layer, heads, kv, out, batch, self._long_tiles, is_decode=False)

    def _attend(
        self,
        layer: LayerHeads,
        heads: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        tiles: torch.Tensor,
        *,
        is_decode: bool,
    ) -> None:
        if self._kernel is None:
            self._kernel = InvariantAttention(heads.device)
        self._kernel.run(
            heads,
            kv,
            batch.page_table,
            tiles,
            out,
            choose_tile(layer.head_size, heads.dtype),
            scale=layer.scale,
            window=layer.window,
            first=layer.first,
            softcap=layer.softcap,
            sinks=layer.sinks,
            is_decode=is_decode,
        )
