"""Token embedding and output head, split over ranks by vocabulary; the two may be one matrix."""

import torch
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm
from octavo.layers.sharding import WeightSlot, WeightSlots, plain, share_rows, share_size
from octavo.quants import Weight
from octavo.weights.methods.base import HeldWeight, Use, WeightRequest


class Embedding(nn.Module):
    """Each rank holds its share of the vocabulary's rows; where ranks do not divide it, the last hold rows of zeros.
    Rows are multiplied by `factor` when they are read: a tied head has them as they are."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext, factor: float = 1.0) -> None:
        super().__init__()
        self.group = context.group
        self.factor = factor
        self.full_shape = (vocab_size, hidden_size)
        self.num_rows = share_size(vocab_size, context.group)
        self.first_id = context.group.rank * self.num_rows
        self.table = context.methods.table(WeightRequest((self.num_rows,), hidden_size, Use.VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, hidden], the same on every rank."""
        return self.look_up(ids, self.factor)

    def look_up(self, ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """As forward(), with another factor."""
        if self.group.size == 1:
            return self.table.look_up(ids, factor)
        mine = ids - self.first_id
        is_elsewhere = (mine < 0) | (mine >= self.num_rows)
        rows = self.table.look_up(mine.masked_fill_(is_elsewhere, 0), factor)
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def weight_slots(self, name: str) -> WeightSlots:
        def store(tensor: Weight) -> None:
            self.table.fill(0, share_rows(tensor, self.group))

        return {f"{name}.weight": WeightSlot(self.full_shape, store)}


class LearnedPositions(nn.Module):
    """A vector for each position, added to the tokens'. Whole on every rank.
    `num_skipped`: rows before the first position's, which a checkpoint has and no token uses."""

    def __init__(self, num_positions: int, hidden_size: int, context: BuildContext, num_skipped: int = 0) -> None:
        super().__init__()
        self.weight = context.empty(num_positions, hidden_size)
        self.ops = context.ops
        self._num_skipped = num_skipped

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], changed; positions [T]."""
        return self.ops.add_positions(x, positions, self.weight)

    def weight_slots(self, name: str) -> WeightSlots:
        def store(tensor: Weight) -> None:
            self.weight.copy_(plain(tensor)[self._num_skipped :])

        num_positions, hidden_size = self.weight.shape
        return {f"{name}.weight": WeightSlot((num_positions + self._num_skipped, hidden_size), store)}


class Head(nn.Module):
    """Hidden states to logits over the whole vocabulary, gathered from the ranks. Tied: its weight is the embedding's.

    `softcap`: logits become softcap · tanh(logit / softcap); 0: they stay."""

    def __init__(
        self, hidden_size: int, vocab_size: int, context: BuildContext, is_tied: bool, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.softcap = softcap
        self.group, self.ops = context.group, context.ops
        self.is_tied = is_tied
        self.full_shape = (vocab_size, hidden_size)
        self.weight: HeldWeight | None = None  # until tie(), where it is tied
        if not is_tied:
            num_rows = share_size(vocab_size, context.group)
            self.weight = context.methods.linear(WeightRequest((num_rows,), hidden_size, Use.VOCABULARY))

    def forward(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """[S, hidden] → [S, vocabulary] of norm(hidden), the same on every rank."""
        logits = self.product(hidden, norm)
        if self.softcap:
            logits = self.ops.cap(logits, self.softcap)
        if self.group.size > 1:
            # Shares are equal in size: the padding of the last ones is cut off.
            logits = self.group.all_gather_last(logits)[:, : self.full_shape[0]].contiguous()
        return logits

    def product(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """This rank's share of the logits, as they are before the cap."""
        assert self.weight is not None, "tied, and not loaded"
        return self.weight.product(hidden, None if norm is None else norm.values)

    def weight_slots(self, name: str) -> WeightSlots:
        weight = self.weight
        if weight is None:
            return {}
        return {
            f"{name}.weight": WeightSlot(self.full_shape, lambda tensor: weight.fill(0, share_rows(tensor, self.group)))
        }

    def tie(self, embedding: Embedding) -> None:
        """After loading: where it is tied, share the embedding's weight, in one copy."""
        if self.is_tied:
            self.weight = embedding.table.as_head()
