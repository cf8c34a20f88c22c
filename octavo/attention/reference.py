"""The reference attention backend: plain torch, one row at a time, in float32. Tests compare the other backends with it."""

import torch

from octavo.attention.base import LayerHeads, storable
from octavo.attention.qk_norm_rope import qk_norm_rope
from octavo.batch import Batch
from octavo.spec import ModelSpec


class ReferenceAttention:
    name = "reference"
    page_dim = 0
    pages_may_lie_apart = False
    can_capture = False

    def __init__(self) -> None:
        self._kv: list[torch.Tensor] = []

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        return None if kv_dtype.is_floating_point else f"its pages hold floating-point numbers, not {kv_dtype}"

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, page_size, 2, spec.rank_kv_heads(tensor_parallel), spec.head_size)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        self._kv = kv

    def plan(self, batch: Batch) -> None:
        pass

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        q, k, v = qk_norm_rope(heads, layer.num_heads, layer.num_kv_heads, rotation, layer.norms)
        kv = self._kv[layer.index]
        page_size = kv.shape[1]
        kv[batch.slots // page_size, batch.slots % page_size] = storable(torch.stack((k, v), dim=1), kv.dtype)
        output = torch.empty_like(q)
        for row in range(batch.num_rows):
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            length = int(batch.seq_lens[row])
            pages = batch.page_table[row, : -(-length // page_size)].long()
            keys, values = kv[pages].flatten(0, 1)[:length].float().unbind(dim=1)  # [L, Hkv, D] each
            output[first:last] = _attend(layer, q[first:last].float(), keys, values).to(q.dtype)
        return output.flatten(1)


def _attend(layer: LayerHeads, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with the queries q [N, H, D] of the last N of L positions; keys and values [L, Hkv, D] → [N, H, D]."""
    num, heads, _ = q.shape
    length = keys.shape[0]
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    values = values.repeat_interleave(heads // values.shape[1], dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, keys) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    positions = torch.arange(length - num, length, device=q.device)[:, None]
    others = torch.arange(length, device=q.device)[None, :]
    hidden = others > positions  # [N, L]
    if layer.window:
        hidden |= others <= positions - layer.window
    hidden |= others < layer.first
    scores = scores.masked_fill(hidden, float("-inf"))  # [H, N, L]
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.view(-1, 1, 1).expand(-1, num, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[:, :, :length]
    return torch.einsum("hnl,lhd->nhd", weights, values)
