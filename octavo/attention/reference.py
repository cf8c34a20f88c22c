"""The reference attention backend: plain torch, one row at a time, in float32. What every other backend is tested against.
Knows nothing of speed."""

import torch

from octavo.attention.base import finite
from octavo.batch import Batch
from octavo.spec import ModelSpec


class ReferenceAttention:
    name = "reference"
    page_dim = 0

    def __init__(self) -> None:
        self._kv: list[torch.Tensor] = []

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, page_size, 2, spec.num_kv_heads // tensor_parallel, spec.head_size)

    def bind(self, kv: list[torch.Tensor]) -> None:
        self._kv = kv

    def plan(self, batch: Batch) -> None:
        pass

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        kv = self._kv[layer]
        page_size = kv.shape[1]
        kv[batch.slots // page_size, batch.slots % page_size] = finite(torch.stack((k, v), dim=1).to(kv.dtype))
        output = torch.empty_like(q)
        for row in range(batch.num_rows):
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            length = int(batch.seq_lens[row])
            pages = batch.page_table[row, : -(-length // page_size)].long()
            keys, values = kv[pages].flatten(0, 1)[:length].float().unbind(dim=1)  # [L, Hkv, D] each
            output[first:last] = _attend(q[first:last].float(), keys, values).to(q.dtype)
        return output.flatten(1)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q [N, H, D] are the last N of the L positions whose keys and values [L, Hkv, D] are given → [N, H, D]."""
    num, heads, size = q.shape
    length = keys.shape[0]
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    values = values.repeat_interleave(heads // values.shape[1], dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, keys) * size**-0.5
    positions = torch.arange(length - num, length, device=q.device)
    hidden = torch.arange(length, device=q.device)[None, :] > positions[:, None]  # [N, L]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, values)
