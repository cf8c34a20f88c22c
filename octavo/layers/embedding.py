"""Token embedding and output head, split over ranks by vocabulary; the two may be one matrix.
Knows nothing of tokenizers: ids are integers below the vocabulary size."""

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear
from octavo.layers.native import NativeWeight
from octavo.layers.norm import Norm
from octavo.layers.packing import PackedRows
from octavo.layers.sharding import Slot, Slots, fill_share, padded_share, plain, share_size
from octavo.quants import Weight


class Embedding(nn.Module):
    """Each rank holds its share of the vocabulary's rows; where ranks do not divide it, the last hold rows of zeros.
    Rows are multiplied by `factor` when they are read: a tied head has them as they are."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext, factor: float = 1.0) -> None:
        super().__init__()
        self.group = context.group
        self.factor = factor
        self.whole_shape = (vocab_size, hidden_size)
        self.num_rows = share_size(vocab_size, context.group)
        self.first_id = context.group.rank * self.num_rows
        self.native = None if context.native is None else NativeWeight.of_vocabulary(context)
        self.weight = context.empty(self.num_rows if self.native is None else 0, hidden_size)
        self._packed: PackedRows | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, hidden], the same on every rank."""
        if self.group.size == 1:
            return self._rows(ids)
        mine = ids - self.first_id
        is_elsewhere = (mine < 0) | (mine >= self.num_rows)
        rows = self._rows(mine.masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.native is not None:
            return self.native.embed(ids, self.factor)
        rows = F.embedding(ids, self.weight) if self._packed is None else self._packed[ids]
        return rows if self.factor == 1.0 else rows.mul_(self.factor)

    def slots(self, name: str) -> Slots:
        def store(tensor: Weight) -> None:
            if self.native is not None:
                self.native.fill(0, padded_share(tensor, self.group))
            else:
                fill_share(self.weight, plain(tensor), self.group)

        return {f"{name}.weight": Slot(self.whole_shape, store)}

    def read_from(self, rows: PackedRows) -> None:
        """Give up the own copy: the head's packed weight holds the same rows."""
        self._packed = rows
        self.weight = self.weight.new_empty(0)


class LearnedPositions(nn.Module):
    """A vector for each position, added to the tokens'. Whole on every rank.
    `num_skipped`: rows before the first position's, which a checkpoint has and no token uses."""

    def __init__(self, num_positions: int, hidden_size: int, context: BuildContext, num_skipped: int = 0) -> None:
        super().__init__()
        self.weight = context.empty(num_positions, hidden_size)
        self._native = context.native
        self._num_skipped = num_skipped

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], changed; positions [T]."""
        if self._native is not None:
            return self._native.add_positions(x, positions, self.weight)
        return x.add_(F.embedding(positions, self.weight))

    def slots(self, name: str) -> Slots:
        def store(tensor: Weight) -> None:
            self.weight.copy_(plain(tensor)[self._num_skipped :])

        num_positions, hidden_size = self.weight.shape
        return {f"{name}.weight": Slot((num_positions + self._num_skipped, hidden_size), store)}


class Head(nn.Module):
    """Hidden states to logits over the whole vocabulary, gathered from the ranks. Tied: its weight is the embedding's.

    Its weight stays in the model's type: an error in a logit is an error in the answer, no later layer evens it out.
    `softcap`: logits become softcap · tanh(logit / softcap); 0: they stay."""

    def __init__(
        self, hidden_size: int, vocab_size: int, context: BuildContext, is_tied: bool, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.softcap = softcap
        self._native = context.native
        self.group = context.group
        self.is_tied = is_tied
        self.vocab_size = vocab_size
        self.product = ColumnLinear(hidden_size, [vocab_size], context, is_vocabulary=True, is_adopted=is_tied)

    def forward(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """[S, hidden] → [S, vocabulary] of norm(hidden), the same on every rank."""
        logits: torch.Tensor = self.product(hidden, norm)
        if self.softcap and self._native is not None:
            logits = self._native.cap(logits, self.softcap)
        elif self.softcap:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.group.size > 1:
            # Shares are equal in size: the padding of the last ones is cut off.
            logits = self.group.all_gather_last(logits)[:, : self.vocab_size].contiguous()
        return logits

    def slots(self, name: str) -> Slots:
        return {} if self.is_tied else self.product.slots(name)

    def tie(self, embedding: Embedding) -> None:
        """After loading: where it is tied, share the embedding's weight, in one copy."""
        if not self.is_tied:
            return
        if embedding.native is not None:
            self.product.native = embedding.native
            return
        unpacked = embedding.weight
        self.product.adopt(unpacked)
        rows = PackedRows.of(self.product.weight, unpacked) if self.product.is_packed else None
        if rows is not None:
            embedding.read_from(rows)
