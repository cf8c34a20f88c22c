"""Attention on GPUs by the Triton kernels in kernels/triton/attention: one launch per layer for a step's decode rows, one
for its longer rows.

A store is [pages, 2, Hkv, page_size, D]: keys (0) and values (1) of one head in one page are contiguous."""

import numpy as np
import torch

from octavo.attention.base import LayerHeads
from octavo.batch import Batch
from octavo.kernels.triton.attention.decode_plan import DecodeWork
from octavo.kernels.triton.attention.paged_decode import DecodeAttention
from octavo.kernels.triton.attention.paged_prefill import Tile, choose_tile, paged_prefill, plan_tiles
from octavo.kernels.triton.attention.qk_norm_rope_store import qk_norm_rope_store
from octavo.spec import ModelSpec

_MIN_HEAD_SIZE, _MAX_HEAD_SIZE = 16, 256


class TritonAttention:
    name = "triton"
    page_dim = 0
    pages_may_lie_apart = False
    can_capture = True
    is_fixed = False  # whether norms sum in the same order for any number of tokens

    def __init__(self) -> None:
        self._kv: list[torch.Tensor] = []
        self._max_rows = 0
        self._decode: DecodeAttention | None = None
        # Of the planned step: the work of the decode rows by window and first position, the tiles of the longer rows by tile shape.
        self._works: dict[tuple[int, int], DecodeWork] = {}
        self._tiles: dict[Tile, torch.Tensor] = {}
        self._has_no_prefix = False
        # By whether a layer needs the general kernel, and has_no_prefix.
        self._chosen: dict[tuple[bool, bool], Tile] = {}

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        if not _MIN_HEAD_SIZE <= spec.head_size <= _MAX_HEAD_SIZE:
            return f"it supports head sizes of {_MIN_HEAD_SIZE} to {_MAX_HEAD_SIZE}, not {spec.head_size}"
        if kv_dtype not in (dtype, torch.float8_e4m3fn):
            return f"its pages hold {dtype} or 8-bit numbers, not {kv_dtype}"
        is_8_bit = kv_dtype == torch.float8_e4m3fn
        if is_8_bit and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "8-bit pages need a GPU of NVIDIA's Ada or Hopper generation, or later"
        return None

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, 2, spec.rank_kv_heads(tensor_parallel), page_size, spec.head_size)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        self._kv, self._max_rows = kv, max_rows
        self._decode = None
        self._chosen = {}

    def plan(self, batch: Batch) -> None:
        self._works = {}
        self._tiles = {}
        rows = slice(batch.num_decodes, None)
        # If every prompt is computed whole in this step, keys and values are read from the QKV product, in larger blocks
        # than pages. They are kept there as an 8-bit store has them, so that a prompt gives the same answer whole and in chunks.
        self._has_no_prefix = batch.query_lens_host[rows] == batch.seq_lens_host[rows]

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        kv, norms = self._kv[layer.index], layer.norms
        has_long = batch.num_decodes < batch.num_rows
        size = layer.head_size
        has_no_prefix = has_long and self._has_no_prefix and size & (size - 1) == 0
        qk_norm_rope_store(
            heads,
            layer.num_heads,
            layer.num_kv_heads,
            None if rotation is None else torch.view_as_real(rotation),
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            0.0 if norms is None else norms.epsilon,
            kv,
            batch.slots,
            has_no_prefix,
            is_fixed=self.is_fixed,
            pdl=True,
        )
        out = heads.new_empty((heads.shape[0], layer.num_heads * layer.head_size))
        if batch.num_decodes:
            self._attend_decodes(layer, heads, kv, out, batch)
        if has_long:
            self._attend_long(layer, heads, kv, out, batch, has_no_prefix)
        return out

    def _tile_of(self, layer: LayerHeads, dtype: torch.dtype, kv: torch.Tensor, has_no_prefix: bool) -> Tile:
        """The tile for a layer. Cached, because run() asks once per layer."""
        # The specialised kernel has no window, soft cap or sinks, and sees all keys from position 0 on.
        needs_general = bool(layer.window or layer.first or layer.softcap) or layer.sinks is not None
        tile = self._chosen.get((needs_general, has_no_prefix))
        if tile is None:
            on_gpu = kv.device.type == "cuda"
            tile = self._chosen[needs_general, has_no_prefix] = choose_tile(
                layer.head_size,
                layer.num_heads // layer.num_kv_heads,
                kv.shape[3],
                dtype,
                dtype if has_no_prefix else kv.dtype,
                capability=torch.cuda.get_device_capability(kv.device) if on_gpu else (0, 0),
                needs_general=needs_general,
            )
        return tile

    def _attend_decodes(
        self, layer: LayerHeads, heads: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, batch: Batch
    ) -> None:
        num_rows = batch.num_decodes
        if self._decode is None:
            self._decode = DecodeAttention(
                self._max_rows, layer.num_heads, layer.num_kv_heads, layer.head_size, heads.device
            )
        work = self._works.get((layer.window, layer.first))
        if work is None:
            # A window soon moves past the shared prefix, so windowed layers do not share it. Draft heads do not either.
            prefix_len = None if layer.window or layer.first else batch.prefix_len
            work = self._decode.plan(
                batch.seq_lens[:num_rows], window=layer.window, first=layer.first, prefix_len=prefix_len
            )
            self._works[layer.window, layer.first] = work
        self._decode.run(
            work,
            heads[:num_rows, : layer.num_heads],
            kv,
            batch.page_table[:num_rows],
            out[:num_rows],
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
            pdl=True,
        )

    def _attend_long(
        self,
        layer: LayerHeads,
        heads: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        has_no_prefix: bool,
    ) -> None:
        group = layer.num_heads // layer.num_kv_heads
        tile = self._tile_of(layer, heads.dtype, kv, has_no_prefix)
        tiles = self._tiles.get(tile)
        if tiles is None:
            tiles = self._tiles[tile] = on_device(
                plan_tiles(batch.query_lens_host, batch.seq_lens_host, batch.num_decodes, tile.tokens(group)),
                heads.device,
            )
        paged_prefill(
            heads,
            kv,
            batch.page_table,
            tiles,
            out,
            tile,
            scale=layer.scale,
            window=layer.window,
            first=layer.first,
            softcap=layer.softcap,
            sinks=layer.sinks,
            has_no_prefix=has_no_prefix,
        )


def on_device(numbers: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting: from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
