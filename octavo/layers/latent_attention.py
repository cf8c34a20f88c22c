"""Attention over latents: the keys and values of all heads are products of one small vector of a token, which is what pages hold.

A head's key is up · latent beside a rotated part that all heads share; its value is another product of the latent. Nothing is
unpacked: scores are (upᵀ · query) · latent, so each query is multiplied once, and what is attended to are the latents of a
single KV head. A head is laid out [rotated | latent]; its value is [0 | latent], of which the second part is used."""

from dataclasses import dataclass

import torch
from torch import nn

from octavo.attention.base import LayerHeads
from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.sharding import WeightSlot, plain
from octavo.quants import Weight
from octavo.spec import ModelSpec
from octavo.weights.methods.base import HeadsRequest


@dataclass(frozen=True, slots=True)
class LatentSizes:
    latent: int
    rotated: int  # of a head's key, shared by all heads
    unrotated: int  # … and what comes from the latent
    value: int
    query: int = 0  # the latent that queries come from; 0: none, they come from the hidden state


class LatentAttention(nn.Module):
    """x + attention(norm(x)). Heads are split over ranks; latents are whole on each. `bias`: of the products to latents and
    of the output."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        sizes: LatentSizes,
        norm: Norm,
        alone: BuildContext,
        context: BuildContext,
        *,
        scale: float,
        epsilon: float,
        bias: bool,
    ) -> None:
        """`alone`: the context of a rank that has no others, for what every rank holds whole."""
        super().__init__()
        assert spec.num_kv_heads == 1 and spec.head_size == sizes.rotated + sizes.latent
        self.norm, self.sizes = norm, sizes
        self.backend, self.group = context.attention, context.group
        self.num_heads = spec.num_heads // context.group.size
        width = spec.num_heads * (sizes.unrotated + sizes.rotated)
        self.query_latent = ColumnLinear(spec.hidden_size, (sizes.query,), alone, bias=bias) if sizes.query else None
        self.query_norm = RMSNorm(sizes.query, epsilon, context) if sizes.query else norm
        self.query = ColumnLinear(sizes.query or spec.hidden_size, (width,), context)
        self.latent = ColumnLinear(spec.hidden_size, (sizes.latent + sizes.rotated,), alone, bias=bias)
        self.latent_norm = RMSNorm(sizes.latent, epsilon, context)
        self.key_up = context.methods.heads(HeadsRequest(self.num_heads, sizes.latent, sizes.unrotated))
        self.value_up = context.methods.heads(HeadsRequest(self.num_heads, sizes.value, sizes.latent))
        self.output = RowLinear(spec.num_heads * sizes.value, spec.hidden_size, context, bias=bias)
        self.heads = LayerHeads(index, self.num_heads, 1, spec.head_size, scale)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        attended = self.backend.run(self.heads, self._laid_out(x), rotation, batch)
        latents = attended.view(len(x), self.num_heads, -1)[..., self.sizes.rotated :]  # [T, H, latent]
        out: torch.Tensor = self.output(self.value_up.product(latents).reshape(len(x), -1), x)
        return out

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """→ [T, H + 2, D] as a backend takes them."""
        sizes, num_heads, rotated = self.sizes, self.num_heads, self.sizes.rotated
        before = x if self.query_latent is None else self.query_latent(x, self.norm)
        queries = self.query(before, self.query_norm).view(len(x), num_heads, sizes.unrotated + rotated)
        latents = self.latent(x, self.norm)  # [T, latent + rotated]
        normed = self.latent_norm(latents[:, : sizes.latent].contiguous())
        heads: torch.Tensor = queries.new_empty(len(x), num_heads + 2, rotated + sizes.latent)
        heads[:, :num_heads, :rotated] = queries[..., sizes.unrotated :]
        heads[:, :num_heads, rotated:] = self.key_up.product(queries[..., : sizes.unrotated])
        heads[:, num_heads, :rotated] = latents[:, sizes.latent :]
        heads[:, num_heads + 1, :rotated] = 0.0
        heads[:, num_heads:, rotated:] = normed[:, None]
        return heads

    def up_slot(self) -> WeightSlot:
        """Weight slot of one tensor that holds both products with the latent, rows [heads, unrotated + value]."""
        rows = self.num_heads * self.group.size * (self.sizes.unrotated + self.sizes.value)
        return WeightSlot((rows, self.sizes.latent), self._fill_up)

    def _fill_up(self, weight: Weight) -> None:
        """Split the tensor by head into the parts for keys and values. The keys' part is transposed: queries are multiplied by it."""
        by_head = plain(weight).reshape(-1, self.sizes.unrotated + self.sizes.value, self.sizes.latent)
        first = self.group.rank * self.num_heads
        for head, rows in enumerate(by_head[first : first + self.num_heads]):
            self.key_up.fill(head, rows[: self.sizes.unrotated].t())
            self.value_up.fill(head, rows[self.sizes.unrotated :])
