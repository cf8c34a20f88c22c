"""Self-attention: norm, one fused product for q, k and v, the backend, and the output product. Heads are split over ranks.
Knows nothing of pages: the backend does."""

import torch
from torch import nn

from octavo.attention.base import LayerHeads
from octavo.attention.turn import HeadNorms
from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import Norm
from octavo.spec import ModelSpec


class SelfAttention(nn.Module):
    """x + attention(norm(x)); without a norm: x + attention(x). `sinks`: [H of this rank] float32, filled by who made them."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        norm: Norm | None,
        context: BuildContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        window: int = 0,
        softcap: float = 0.0,
        head_norms: HeadNorms | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        # The cache lets go of pages by what the spec says: a layer that looks further back would read another's.
        assert window == (spec.windows[index] if spec.windows else 0), "a layer's window is not the spec's"
        self.norm = norm
        self.backend = context.attention
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.qkv = ColumnLinear(spec.hidden_size, (q_size, kv_size, kv_size), context, bias=qkv_bias)
        self.output = RowLinear(q_size, spec.hidden_size, context, bias=output_bias)
        num_heads = spec.num_heads // context.group.size
        num_kv_heads = spec.num_kv_heads // context.group.size
        scale = spec.head_size**-0.5
        self.heads = LayerHeads(
            index, num_heads, num_kv_heads, spec.head_size, scale, window, softcap, head_norms, sinks
        )
        self._heads_shape = (num_heads + 2 * num_kv_heads, spec.head_size)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden], which may be changed. `rotation`: the step's rotary factors, for families that use them."""
        heads = self.qkv(x, self.norm).view(-1, *self._heads_shape)  # [T, H + 2 Hkv, D]
        attended: torch.Tensor = self.output(self.backend.run(self.heads, heads, rotation, batch), x)
        return attended
