"""Token embedding and output head, split over ranks by vocabulary; the two may be one matrix.
Knows nothing of tokenizers: ids are integers below the vocabulary size."""

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear
from octavo.layers.sharding import Slot, Slots, share


class Embedding(nn.Module):
    """Each rank holds its share of the vocabulary's rows. Where the head is tied, the rows fill it too."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.group = context.group
        self.whole_shape = (vocab_size, hidden_size)
        self.num_rows = vocab_size // context.group.size
        self.first_id = context.group.rank * self.num_rows
        self.weight = context.empty(self.num_rows, hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, hidden], the same on every rank."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        mine = ids - self.first_id
        is_elsewhere = (mine < 0) | (mine >= self.num_rows)
        rows = F.embedding(mine.masked_fill_(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def slots(self, name: str, tied_head: "Head | None" = None) -> Slots:
        def store(tensor: torch.Tensor) -> None:
            self.weight.copy_(share(tensor, 0, self.group))
            if tied_head is not None:
                tied_head.product.fill_weight(0, tensor)

        return {f"{name}.weight": Slot(self.whole_shape, store)}


class Head(nn.Module):
    """Hidden states to logits over the whole vocabulary, gathered from the ranks."""

    def __init__(self, hidden_size: int, vocab_size: int, context: BuildContext) -> None:
        super().__init__()
        self.group = context.group
        self.product = ColumnLinear(hidden_size, [vocab_size], context)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] → [S, vocabulary] float32, the same on every rank."""
        logits: torch.Tensor = self.product(hidden)
        if self.group.size > 1:
            logits = self.group.all_gather_last(logits)
        return logits.float()

    def slots(self, name: str) -> Slots:
        return self.product.slots(name)
