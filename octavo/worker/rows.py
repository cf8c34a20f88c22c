"""Rows: what a rank remembers between steps of the sequences that run: tokens, page tables, sampling parameters.
Knows nothing of requests or of who decides which row holds what."""

from typing import NamedTuple

import numpy as np
import torch

from octavo.device import Device
from octavo.messages import StepPlan
from octavo.sampling.state import Ints, SamplingState
from octavo.worker.staging import Staging


class PageChanges(NamedTuple):
    """Entries of the flattened page table that change, and what they become."""

    cells: Ints
    pages: Ints


class Rows:
    """A row keeps its place for as long as its occupant runs; a step names rows and carries only what changed.

    The token table lives on the device, and sampled tokens are written to it there: a step reads its inputs from the
    table whether a token came from the host or was sampled a moment ago, so the host need not have seen it. Page tables
    are kept on both sides: the host looks at them when it assembles a step, a GPU when it repeats one."""

    def __init__(
        self, max_rows: int, max_model_len: int, page_size: int, vocab_size: int, device: Device, staging: Staging
    ) -> None:
        self.page_size = page_size
        # One column more than a sequence is long: a step planned ahead of a finish may sample one token too many.
        self.width = max_model_len + 1
        place = device.torch_device
        self.tokens = torch.zeros(max_rows, self.width, dtype=torch.int32, device=place)
        self.max_pages = -(-self.width // page_size)
        self.page_table = np.zeros((max_rows, self.max_pages), dtype=np.int32)  # entries without a page are 0
        self.device_page_table = torch.from_numpy(self.page_table)
        if device.is_cuda:
            self.device_page_table = self.device_page_table.to(place)
        self.sampling = SamplingState(max_rows, vocab_size)
        self._staging = staging
        self._is_cuda = device.is_cuda

    def update(self, plan: StepPlan) -> None:
        """Apply what the plan says of the rows themselves: who entered, which pages were added. Who left is not read again."""
        for entering in plan.enters:
            row, pages = entering.row, entering.pages
            self.page_table[row] = 0
            self.page_table[row, : len(pages)] = pages
            self.sampling.enter(row, entering.params, entering.seed, entering.prompt_len, entering.stop_ids)
        if plan.page_rows:
            self.page_table[plan.page_rows, plan.page_slots] = plan.page_ids
        self._tell_device(plan)

    def note_pages(self, plan: StepPlan) -> PageChanges:
        """For a plan in which nobody enters: the same here as update(), but the device is told by whoever asks."""
        assert not plan.enters
        rows, slots, pages = (
            np.array(column, dtype=np.int64) for column in (plan.page_rows, plan.page_slots, plan.page_ids)
        )
        self.page_table[rows, slots] = pages
        return PageChanges(rows * self.max_pages + slots, pages)

    def _tell_device(self, plan: StepPlan) -> None:
        columns = []
        if plan.enters:
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
            self.device_page_table.view(-1).index_copy_(0, sent[-2], sent[-1])

    def _changed_pages(self, plan: StepPlan) -> "list[np.ndarray[tuple[int], np.dtype[np.generic]]]":
        """What an entering row holds beyond its pages is not read, so it is not cleared there."""
        entered = _cells([(e.row, e.pages) for e in plan.enters], self.max_pages)
        rows, slots = np.array(plan.page_rows, dtype=np.int64), np.array(plan.page_slots, dtype=np.int64)
        cells = np.concatenate((entered[0], rows * self.max_pages + slots))
        # An entering row may get more pages in the same plan; the same cell never comes twice.
        return [cells, np.concatenate((entered[1], np.array(plan.page_ids, dtype=np.int32)))]

    def cells(self, rows: Ints, positions: Ints) -> Ints:
        """Where those places are in the flattened token table."""
        return rows * self.width + positions


def _cells(rows: list[tuple[int, list[int]]], width: int) -> "list[np.ndarray[tuple[int], np.dtype[np.generic]]]":
    """Each row's numbers from its first cell on: (cells int64, numbers int32) of a table that is `width` wide."""
    if not rows:
        return [np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)]
    cells = np.concatenate([np.arange(row * width, row * width + len(numbers)) for row, numbers in rows])
    numbers = np.concatenate([np.array(numbers, dtype=np.int32) for _, numbers in rows])
    return [cells, numbers]
