"""EagerGraphs: what Graphs does, without a GPU: the steps that it would replay are computed operation by operation, from the same rows and
lengths and with the same writes to the token table and to the host."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.batch import Batch
from octavo.layers.model import DecoderModel
from octavo.messages import NO_INPUT
from octavo.models.draft_heads.base import DraftHead
from octavo.worker.assemble import Columns, assemble
from octavo.worker.rows import PageChanges, RowState
from octavo.worker.staging import Staging

NUM_SLOTS = 16  # as many steps keep their tokens on the host


class EagerGraphs:
    num_captured = 0

    def __init__(
        self,
        rows: RowState,
        model: DecoderModel,
        staging: Staging,
        max_rows: int,
        features: torch.Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`features`: [slots, D] where there is a draft head. `vocab_size`: of the model, for a head."""
        self._features, self._vocab_size = features, vocab_size
        self._rows, self._model, self._staging, self._max_rows = rows, model, staging, max_rows
        self._sent = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        self._host_tokens = torch.zeros(NUM_SLOTS, max_rows, dtype=torch.int32)
        self.sizes: list[int] = []  # rows of each step

    def forget(self) -> None: ...

    def can_run(self, num_rows: int, num_changes: int = 0) -> bool:
        return num_rows <= self._max_rows

    def run(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        changes: PageChanges,
        shared_len: int,
        is_greedy: bool,
        adapters: object = None,
        drafted: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        self.sizes.append(len(rows))
        self._sent = (np.array(rows), np.array(lens))
        self._step(is_greedy, drafted)
        return self._step(is_greedy, drafted)  # the step that captures a graph is run twice, with the same inputs

    def _step(self, is_greedy: bool, drafted: Sequence[int] | None) -> torch.Tensor | None:
        rows, lens = self._sent
        for row, length, token in () if drafted is None else zip(rows.tolist(), lens.tolist(), drafted, strict=True):
            if token != NO_INPUT:
                self._rows.tokens[row, length - 1] = token
        of_rows = np.where(rows < 0, -1 - rows, rows)
        ones = np.ones(len(rows), dtype=np.int64)
        batch = assemble(Columns(of_rows, ones, lens, ones.astype(np.bool_)), self._rows, self._staging).batch
        hidden = self._model.forward(batch, self._features_before(of_rows, lens))
        self._write_features(rows, batch, hidden)
        logits = self._model.logits(hidden)
        if isinstance(self._model, DraftHead):
            logits = self._model.spread(logits, self._vocab_size)
        if not is_greedy:
            return logits.clone()
        self.store(logits.argmax(-1))
        return None

    def _features_before(self, rows: np.ndarray, lens: np.ndarray) -> torch.Tensor | None:
        """Of the position before each token."""
        if not isinstance(self._model, DraftHead):
            return None
        assert self._features is not None
        before, size = np.maximum(lens - 2, 0), self._rows.page_size
        pages = self._rows.page_table[rows, before // size].astype(np.int64)
        return self._features[torch.from_numpy(pages * size + before % size)]

    def _write_features(self, rows: np.ndarray, batch: Batch, hidden: torch.Tensor) -> None:
        if self._features is None:
            return
        if isinstance(self._model, DraftHead):
            chained = self._model.chained(hidden)
            for at, row in enumerate(rows.tolist()):
                if row >= 0:
                    self._features[batch.slots[at]] = chained[at]
        else:
            assert self._model.tap is not None and self._model.tap.features is not None
            self._features[batch.slots] = self._model.tap.features

    def store(self, sampled: torch.Tensor) -> None:
        rows, lens = self._sent
        for row, length, token in zip(rows.tolist(), lens.tolist(), sampled.tolist(), strict=True):
            if row >= 0:
                self._rows.tokens[row, length] = token
        self._host_tokens[(len(self.sizes) - 1) % NUM_SLOTS, : len(sampled)] = sampled

    def host_tokens(self, num_rows: int) -> torch.Tensor:
        return self._host_tokens[(len(self.sizes) - 1) % NUM_SLOTS, :num_rows]
