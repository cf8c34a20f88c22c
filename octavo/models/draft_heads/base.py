"""DraftHead: what the worker uses of a draft head, whatever its kind.

At position p a head takes the embedding of token p and the feature of position p − 1, and says what token p + 1 is. A feature is made of the
model's hidden states at its position. Where the model has not been yet, the head's own output takes its place. Nothing is computed at
position 0, which has no feature before it."""

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from octavo.batch import Batch
from octavo.layers.context import BuildContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import ColumnLinear
from octavo.layers.model import CausalModel, DecoderLayer, DecoderModel, HiddenTap
from octavo.layers.sharding import WeightSlot, WeightSlots, plain
from octavo.quants import Weight
from octavo.spec import ModelSpec

FIRST = 1
"""The first position that a head computes."""

_NEVER = -1e30
"""Logit of tokens that a head does not have. Finite: a row may allow none of the others."""


class DraftHead(DecoderModel):
    """`target`: the model that it drafts for, whose embedding it uses unless it has one of its own. `spec`: of the head's layers, and of the
    model's vocabulary."""

    vocabulary: torch.Tensor | None = None
    """[Vd] int64: the model's token for each of the head's; None: they have the same."""
    takes_hidden = True

    def __init__(
        self,
        spec: ModelSpec,
        context: BuildContext,
        layers: Iterable[DecoderLayer],
        target: CausalModel,
        has_embedding: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.attention_backend = context.attention
        self.stage, self.num_layers = context.stage, spec.num_layers
        self.hidden_size, self.dtype = spec.hidden_size, context.dtype
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, context) if has_embedding else None
        self.layers = nn.ModuleList(layers)
        for layer in self.layers:
            attention = cast(Any, layer).attention
            attention.heads = dataclasses.replace(attention.heads, first=FIRST)
        self._shared = (target,)  # in a tuple: no part of this module, so that its weights are not counted again

    @property
    def target(self) -> CausalModel:
        return self._shared[0]

    def embed(self, batch: Batch) -> torch.Tensor:
        embedding = self.embedding or self.target.embedding
        assert embedding is not None, "the model has no embedding on this rank"
        return embedding.look_up(batch.input_ids)  # a factor of the model's embedding is not the head's

    def make_tap(self) -> HiddenTap:
        """What makes features of the model's hidden states."""
        raise NotImplementedError

    def chained(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, D] that logits() is given → the feature that stands for the model's at these positions. It may be the same tensor."""
        return hidden

    def spread(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[S, Vd] → [S, V]: of the model's tokens."""
        if self.vocabulary is None:
            return logits[:, :vocab_size]
        lowest = max(_NEVER, torch.finfo(logits.dtype).min)
        spread = logits.new_full((len(logits), vocab_size), lowest)
        return spread.index_copy_(1, self.vocabulary, logits)


def halves(first: WeightSlots, second: WeightSlots) -> WeightSlots:
    """The slots of a product whose input is two vectors side by side, computed as two products that are added, so that nothing is joined.
    Of each tensor, the first columns go to a slot of `first`, and the others to that of `second`. Biases are in `first` alone."""
    found: WeightSlots = {}
    for key, slot in first.items():
        if key not in second:
            found[key] = slot
            continue
        found[key] = _joined(slot, second[key])
    return found


def _joined(first: WeightSlot, second: WeightSlot) -> WeightSlot:
    (rows, width), (_, others) = first.shape, second.shape

    def store(weight: Weight) -> None:
        tensor = plain(weight)
        first.store(tensor[:, :width].contiguous())
        second.store(tensor[:, width:].contiguous())

    return WeightSlot((rows, width + others), store)


def added(linear: ColumnLinear, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """others + the product, without its bias; `others` may be changed."""
    return linear.weight.product_add(x, None, others)
