"""RowState: a rank's state of the running sequences between steps: tokens, page tables, sampling parameters."""

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from octavo.device import Device
from octavo.messages import NO_INPUT, ForcedToken, PoolingParams, StepPlan
from octavo.sampling.grammar.masks import Grammars
from octavo.sampling.state import Ints, SamplingState
from octavo.worker.staging import Staging


class PageChanges(NamedTuple):
    """Entries of the flattened page tables that change, and their new values."""

    cells: Sequence[int]
    pages: Sequence[int]


NO_CHANGES = PageChanges((), ())


class RowState:
    """The tables of all rows. A sequence keeps its row while it runs; a step names rows and carries only what changed.

    The token table is on the device, and sampled tokens are written to it there. A step reads its inputs from the table
    whether a token came from the host or was just sampled, so it need not wait for the host to see it. Page tables are
    kept on both sides: the host reads them to assemble a step, a GPU to replay one."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        page_size: int,
        vocab_size: int,
        device: Device,
        staging: Staging,
        windows: tuple[int, ...] = (0,),
        grammars: Grammars | None = None,
        samples: bool = True,
    ) -> None:
        """`windows`: one for each group of layers, which has its own page tables; 0: the group keeps all pages. `samples`: this rank
        samples; else its rows' parameters are not kept."""
        self.page_size = page_size
        self.num_groups = len(windows)
        # One column more than the longest sequence: a step planned ahead of a finish may sample one token too many.
        self.width = max_model_len + 1
        place = device.torch_device
        self.tokens = torch.zeros(max_rows, self.width, dtype=torch.int32, device=place)
        self.max_pages = -(-self.width // page_size)
        shape = (self.num_groups, max_rows, self.max_pages)
        self.page_tables = np.zeros(shape, dtype=np.int32)  # 0: no page
        self.device_page_tables = torch.from_numpy(self.page_tables)
        if device.is_cuda:
            self.device_page_tables = self.device_page_tables.to(place)
        self.page_table, self.device_page_table = self.page_tables[0], self.device_page_tables[0]
        # Tables that keep all pages of a sequence from its first token on.
        self.unwindowed_tables = [table for table, window in zip(self.page_tables, windows, strict=True) if not window]
        self.sampling = SamplingState(max_rows, vocab_size, grammars)
        self.pooling: dict[int, PoolingParams] = {}  # rows whose request wants a vector instead of tokens
        self.adapters: dict[int, str] = {}  # row → id of its adapter, for rows that have one
        self._staging = staging
        self._is_cuda, self._samples = device.is_cuda, samples

    def leave(self, rows: list[int]) -> None:
        """Clear pooling and sampling state of rows that end. Their other entries are never read again."""
        for row in rows:
            self.pooling.pop(row, None)
            self.adapters.pop(row, None)
            if self._samples:
                self.sampling.leave(row)

    def force(self, forced: list[ForcedToken]) -> None:
        """Write next tokens that were not sampled by their row, such as those of beams."""
        if forced:
            self._write([(one.row, one.position, one.token) for one in forced])

    def take_inputs(self, plan: StepPlan) -> None:
        """Write the tokens that the last stage has sampled for the rows of this plan."""
        columns = zip(plan.rows, plan.starts, plan.inputs, strict=True)
        known = [(row, start, token) for row, start, token in columns if token != NO_INPUT]
        if known:
            self._write(known)

    def _write(self, entries: list[tuple[int, int, int]]) -> None:
        """(row, position, token) each."""
        rows, positions, tokens = np.array(entries, dtype=np.int64).T
        cells, chosen = self._staging.send([self.cells(rows, positions), tokens.astype(np.int32)])
        self.tokens.view(-1).index_copy_(0, cells, chosen)

    def write_drafts(self, plan: StepPlan) -> None:
        """Write drafted tokens, which this step computes and verifies. Samples overwrite them."""
        if not plan.drafts:
            return
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for draft in plan.drafts:
            end = plan.starts[draft.at] + plan.counts[draft.at]
            rows += [plan.rows[draft.at]] * len(draft.tokens)
            positions += range(end - len(draft.tokens), end)
            tokens += draft.tokens
        cells = self.cells(np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64))
        cells_there, drafted = self._staging.send([cells, np.array(tokens, dtype=np.int32)])
        self.tokens.view(-1).index_copy_(0, cells_there, drafted)

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes to rows: entering sequences and added pages."""
        for entering in plan.enters:
            row = entering.row
            for table, pages in zip(self.page_tables, entering.pages, strict=True):
                table[row] = 0
                table[row, : len(pages)] = pages
            if self._samples:
                self.sampling.enter(
                    row,
                    entering.params,
                    entering.seed,
                    entering.prompt_len,
                    entering.stop_ids,
                    entering.token_ids[entering.prompt_len :],
                )
            if entering.pooling is not None:
                self.pooling[row] = entering.pooling
            if entering.params.adapter:
                self.adapters[row] = entering.params.adapter
            else:
                self.adapters.pop(row, None)
        if plan.page_rows:
            if self.num_groups == 1:
                self.page_table[plan.page_rows, plan.page_entries] = plan.page_ids
            else:
                self.page_tables[plan.page_groups, plan.page_rows, plan.page_entries] = plan.page_ids
        self._update_device(plan)

    def note_pages(self, plan: StepPlan) -> PageChanges:
        """As update() on the host, for a plan without entering rows. The caller passes the changes to the device."""
        assert not plan.enters
        if not plan.page_rows:
            return NO_CHANGES
        changes = self._added_pages(plan)
        self.page_tables.reshape(-1)[changes.cells] = changes.pages
        return changes

    def _update_device(self, plan: StepPlan) -> None:
        columns = []
        if plan.enters:
            # Whole, although keys and values of a part may be there already: penalties and edits of logits read all of a row's tokens.
            columns += _cells([(e.row, e.token_ids) for e in plan.enters], self.width)
        has_pages = self._is_cuda and bool(plan.enters or plan.page_rows)
        if has_pages:
            columns += self._changed_pages(plan)
        if not columns:
            return
        sent = self._staging.send(columns)
        if plan.enters:
            self.tokens.view(-1).index_copy_(0, sent[0], sent[1])
        if has_pages:
            self.device_page_tables.view(-1).index_copy_(0, sent[-2], sent[-1])

    def _changed_pages(self, plan: StepPlan) -> "list[np.ndarray[tuple[int], np.dtype[np.generic]]]":
        """(cells, pages) that change on the device. Entries of an entering row beyond its pages are not read, so not cleared."""
        num_rows = self.page_tables.shape[1]
        tables = [
            (group * num_rows + entering.row, pages)
            for entering in plan.enters
            for group, pages in enumerate(entering.pages)
        ]
        entered, added = _cells(tables, self.max_pages), self._added_pages(plan)
        # An entering row may get more pages in the same plan, but no cell occurs twice.
        cells, pages = np.array(added.cells, dtype=np.int64), np.array(added.pages, dtype=np.int32)
        return [np.concatenate((entered[0], cells)), np.concatenate((entered[1], pages))]

    def _added_pages(self, plan: StepPlan) -> PageChanges:
        num_rows, num_pages = self.page_tables.shape[1:]
        columns = zip(plan.page_groups or repeat(0), plan.page_rows, plan.page_entries, strict=False)
        return PageChanges(
            [(group * num_rows + row) * num_pages + entry for group, row, entry in columns], plan.page_ids
        )

    def cells(self, rows: Ints, positions: Ints) -> Ints:
        """Indices of these positions in the flattened token table."""
        return rows * self.width + positions


def _cells(rows: list[tuple[int, list[int]]], width: int) -> "list[np.ndarray[tuple[int], np.dtype[np.generic]]]":
    """(cells int64, numbers int32) that write each row's numbers from its first cell on, in a table of `width` columns."""
    if not rows:
        return [np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)]
    cells = np.concatenate([np.arange(row * width, row * width + len(numbers)) for row, numbers in rows])
    numbers = np.concatenate([np.array(numbers, dtype=np.int32) for _, numbers in rows])
    return [cells, numbers]
