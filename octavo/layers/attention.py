"""Self-attention: norm, one fused product for q, k and v, the backend, and the output product. Heads are split over ranks."""

import torch
from torch import nn

from octavo.attention.base import LayerHeads
from octavo.attention.qk_norm_rope import HeadNorms
from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import Norm, SplitRMSNorm
from octavo.spec import ModelSpec


class SelfAttention(nn.Module):
    """x + output_norm(attention(norm(x))), each norm where there is one.

    `scale`: what scores are multiplied by (None: by the root of the head's size, inverted). `qk_norms`: of all of a token's
    queries together and of all its keys; `head_norms`: of each of them alone. `sinks`: [H of this rank] float32, filled by
    the caller."""

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
        scale: float | None = None,
        head_norms: HeadNorms | None = None,
        sinks: torch.Tensor | None = None,
        qk_norms: tuple[SplitRMSNorm, SplitRMSNorm] | None = None,
        output_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        # The cache frees pages by the spec's windows: a layer that looks further back would read another request's pages.
        assert window == (spec.windows[index] if spec.windows else 0), "a layer's window is not the spec's"
        self.norm, self.output_norm = norm, output_norm
        self.qk_norms = nn.ModuleList(qk_norms or ())
        self.backend = context.attention
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.qkv = ColumnLinear(spec.hidden_size, (q_size, kv_size, kv_size), context, bias=qkv_bias)
        self.output = RowLinear(q_size, spec.hidden_size, context, bias=output_bias)
        num_heads = spec.num_heads // context.group.size
        num_kv_heads = spec.num_kv_heads // context.group.size
        scale = spec.head_size**-0.5 if scale is None else scale
        self.heads = LayerHeads(
            index, num_heads, num_kv_heads, spec.head_size, scale, window, softcap, head_norms, sinks
        )
        self._heads_shape = (num_heads + 2 * num_kv_heads, spec.head_size)
        self._sizes = [count * spec.head_size for count in (num_heads, num_kv_heads, num_kv_heads)]

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden], which may be changed. `rotation`: the step's rotary factors, for families that use them."""
        return self.attended(self.qkv(x, self.norm), x, batch, rotation)

    def attended(self, qkv: torch.Tensor, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None) -> torch.Tensor:
        """x + the attention of qkv [T, q + 2 kv]; both may be changed."""
        if len(self.qk_norms):
            q, k, _ = torch.split(qkv, self._sizes, dim=1)
            for norm, part in zip(self.qk_norms, (q, k), strict=True):
                norm(part)
        heads = qkv.view(-1, *self._heads_shape)  # [T, H + 2 Hkv, D]
        attended = self.backend.run(self.heads, heads, rotation, batch)
        if self.output_norm is not None:
            return self.output_norm.added(self.output(attended, None), x)
        out: torch.Tensor = self.output(attended, x)
        return out
