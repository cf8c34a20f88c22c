"""Attention of an encoder: all tokens of a row see each other, and nothing is stored (a page takes 0 bytes).
In torch, one row at a time, so that no row depends on the others in its batch."""

import torch
import torch.nn.functional as F

from octavo.attention.base import LayerHeads
from octavo.attention.qk_norm_rope import qk_norm_rope
from octavo.batch import Batch
from octavo.spec import ModelSpec


class EncoderAttention:
    name = "whole"
    page_dim = 0
    pages_may_lie_apart = False
    can_capture = False

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        return None if spec.is_encoder else "it is for encoders"

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, 0)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        pass

    def plan(self, batch: Batch) -> None:
        assert batch.query_lens_host == batch.seq_lens_host, "an encoder's rows are computed whole"

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        q, k, v = qk_norm_rope(heads, layer.num_heads, layer.num_kv_heads, rotation, layer.norms)
        output = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        first = 0
        for count in batch.query_lens_host:
            row = slice(first, first + count)
            output[row] = _attend(layer, q[row], k[row], v[row])
            first += count
        return output


def _attend(layer: LayerHeads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend within one row: q [N, H, D], k and v [N, Hkv, D] → [N, H * D]."""
    # Contiguous copies: a product may sum in another order if its inputs are aligned differently.
    q, k, v = (part.transpose(0, 1).contiguous()[None] for part in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1])
    return attended[0].transpose(0, 1).flatten(1)
