"""Self-attention: one fused product for q, k and v, the backend, and the output product. Heads are split over ranks.
Knows nothing of pages: the backend does."""

import torch
from torch import nn

from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.rope import rotate
from octavo.spec import ModelSpec


class SelfAttention(nn.Module):
    def __init__(
        self, layer: int, spec: ModelSpec, context: BuildContext, qkv_bias: bool = False, output_bias: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.backend = context.attention
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.qkv = ColumnLinear(spec.hidden_size, (q_size, kv_size, kv_size), context, bias=qkv_bias)
        self.output = RowLinear(q_size, spec.hidden_size, context, bias=output_bias)
        num_heads = spec.num_heads // context.group.size
        num_kv_heads = spec.num_kv_heads // context.group.size
        self._head_counts = (num_heads, num_kv_heads, num_kv_heads)
        self._heads_shape = (num_heads + 2 * num_kv_heads, spec.head_size)
        self._num_rotated = num_heads + num_kv_heads

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, batch: Batch, rotation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, hidden] → residual + attention(x). `rotation`: the step's rotary factors, for families that use them."""
        heads = self.qkv(x).view(-1, *self._heads_shape)  # [T, H + 2 Hkv, D]
        if rotation is not None:
            rotate(heads[:, : self._num_rotated], rotation)
        q, k, v = heads.split(self._head_counts, dim=1)
        attended: torch.Tensor = self.output(self.backend.run(self.layer, q, k, v, batch), residual)
        return attended
