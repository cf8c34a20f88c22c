"""HeadDrafter: a draft head's passes (decision 064).

A head is computed like a draft model: on pages with the same numbers, for the rows that are asked for a draft, from the first token on that
it lacks. What it needs of the model are features, one for each token. They are kept in pages of their own, written by every step of the
model, so that the head can catch up with a row at any time, also with a prefix that another request has computed.

A pass over a drafted token takes the head's own output for a feature, in the place of the one that the step will write there. So what it
leaves in the pages is computed again once the model has been there."""

import numpy as np
import torch

from octavo.batch import Batch
from octavo.kernels.cpu.native import Native
from octavo.messages import Draft, PageMove, StepPlan
from octavo.messages.speculation import MAX_DRAFT
from octavo.models.draft_heads.base import FIRST, DraftHead
from octavo.worker.assemble import Assembled, Columns, assemble
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.draft_model import DraftModel, FilledPages, Guesses
from octavo.worker.graphs import Graphs
from octavo.worker.pages import Pages
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging

_NOTHING = -1  # tokens of a row that the head cannot follow


class FeaturePages(FilledPages):
    """Also which pages have no features: those that were loaded from a tier."""

    def __init__(self, rows: RowState, num_rows: int, num_pages: int, num_host_pages: int) -> None:
        super().__init__(rows, num_rows, num_pages, num_host_pages)
        self._lacks = np.zeros(num_pages, dtype=np.bool_)
        self._host_lacks = np.zeros(max(1, num_host_pages), dtype=np.bool_)

    def move(self, moves: list[PageMove]) -> None:
        super().move(moves)
        for move in moves:
            source = self._host_lacks if move.kind == "in" else self._lacks
            target = self._host_lacks if move.kind == "out" else self._lacks
            target[move.target] = source[move.source]

    def forget(self, pages: list[int]) -> None:
        super().forget(pages)
        self._lacks[pages] = True

    def written(self, plan: StepPlan) -> None:
        super().written(plan)
        # A page that is written from its first slot on has all of its features; pages from a tier are full, and are not written.
        table, page_size = self._rows.page_table, self._page_size
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._lacks[table[row, -(-start // page_size) : (start + count - 1) // page_size + 1]] = False

    def lacks(self, row: int, first: int, end: int) -> bool:
        """Whether a feature of the row's positions first … end − 1 is missing."""
        page_size = self._page_size
        pages = self._rows.page_table[row, first // page_size : -(-end // page_size)]
        return bool(self._lacks[pages].any())


class HeadDrafter(DraftModel):
    keeps_drafts = False
    reads_shared = False
    most_replayed = MAX_DRAFT + 1  # all tokens of a draft come again, with the model's features
    filled: FeaturePages

    def __init__(
        self,
        head: DraftHead,
        steps: CpuSteps | None,
        native: Native | None,
        pages: Pages,
        feature_pages: Pages,
        rows: RowState,
        staging: Staging,
        filled: FeaturePages,
        vocab_size: int,
        max_tokens: int,
        graphs: Graphs | None = None,
    ) -> None:
        """`feature_pages`: one store, [pages, page_size, D]. On a GPU, captured steps of the model write to it as well, and `graphs` read it."""
        super().__init__(head, steps, native, pages, rows, staging, filled, vocab_size, max_tokens, graphs)
        self._head, self._feature_pages = head, feature_pages
        (store,) = feature_pages.layers
        self._features = store.view(-1, store.shape[-1])  # [slots, D]

    def read(self, batch: Batch, features: torch.Tensor | None) -> None:
        assert features is not None
        self._features.index_copy_(0, batch.slots, features)

    @property
    def stores(self) -> list[torch.Tensor]:
        return [*super().stores, *self._feature_pages.layers]

    def move(self, moves: list[PageMove]) -> None:
        super().move(moves)
        self._feature_pages.move(moves)

    def give_back(self, pages: list[int]) -> None:
        super().give_back(pages)
        self._feature_pages.give_back(pages)

    def behind(self, plan: StepPlan, drafts: list[Draft]) -> tuple[list[int], list[int]]:
        have, more = super().behind(plan, drafts)
        for number, draft in enumerate(drafts):
            row, start = plan.rows[draft.at], plan.starts[draft.at]
            if not have[number]:  # nothing is computed at the first position
                have[number], more[number] = FIRST, max(0, more[number] - FIRST)
            if start < FIRST or self.filled.lacks(row, have[number] - 1, start):
                have[number], more[number] = _NOTHING, 0  # it has not caught up
        return have, more

    def compute(self, columns: Columns) -> Guesses:
        assembled = assemble(columns, self._rows, self._staging)
        batch = assembled.batch
        before = self._slots_before(assembled)
        if self._steps is not None:
            torch.index_select(self._features, 0, before, out=self._steps.input(batch.num_tokens))
            logits = self._steps.run(batch)
            chained = self._steps.features(len(batch.sample_at))
        else:
            hidden = self._head.forward(batch, self._features.index_select(0, before))
            if len(batch.sample_at):
                sampled = hidden.index_select(0, batch.sample_at)
                logits, chained = self._head.logits(sampled), self._head.chained(sampled)
        if not len(batch.sample_at):
            return Guesses([], [])
        self._features.index_copy_(0, batch.slots.index_select(0, batch.sample_at), chained)
        return self._sampled(self._spread(logits), assembled)

    def _slots_before(self, assembled: Assembled) -> torch.Tensor:
        """[T] the slot of the position before each token."""
        rows, page_size = self._rows, self._rows.page_size
        before = np.maximum(assembled.positions - 1, 0)
        pages = rows.page_table[assembled.token_rows, before // page_size].astype(np.int64)
        (slots,) = self._staging.send([pages * page_size + before % page_size])
        return slots

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, Vd] → [S, V]."""
        return self._head.spread(logits, self._vocab_size)
