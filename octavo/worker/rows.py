"""Rows: what a rank remembers between steps of the sequences that run: tokens, page tables, sampling parameters.
Knows nothing of requests or of who decides which row holds what."""

import numpy as np
import torch

from octavo.messages import StepPlan
from octavo.sampling.state import Ints, SamplingState


class Rows:
    """A row keeps its place for as long as its occupant runs; a step names rows and carries only what changed.

    The token table lives on the device, and sampled tokens are written to it there: a step reads its inputs from the
    table whether a token came from the host or was sampled a moment ago, so the host need not have seen it."""

    def __init__(
        self, max_rows: int, max_model_len: int, page_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        # One column more than a sequence is long: a step planned ahead of a finish may sample one token too many.
        self.width = max_model_len + 1
        self.tokens = torch.zeros(max_rows, self.width, dtype=torch.int32, device=device)
        max_pages = -(-self.width // page_size)
        self.page_table = np.zeros((max_rows, max_pages), dtype=np.int32)  # entries without a page are 0
        self.sampling = SamplingState(max_rows, vocab_size)

    def update(self, plan: StepPlan) -> None:
        """Apply what the plan says of the rows themselves: who entered, which pages were added. Who left is not read again."""
        for entering in plan.enters:
            row, token_ids, pages = entering.row, entering.token_ids, entering.pages
            self.tokens[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
            self.page_table[row] = 0
            self.page_table[row, : len(pages)] = pages
            self.sampling.enter(row, entering.params, entering.seed, entering.prompt_len, entering.stop_ids)
        if plan.page_rows:
            self.page_table[plan.page_rows, plan.page_slots] = plan.page_ids

    def read(self, rows: Ints, positions: Ints) -> torch.Tensor:
        """The tokens at those places [T] int64."""
        return self.tokens.view(-1).index_select(0, self._cells(rows, positions)).long()

    def write(self, rows: Ints, positions: Ints, token_ids: torch.Tensor) -> None:
        """Put tokens [S] at those places, without the host seeing them."""
        self.tokens.view(-1).index_copy_(0, self._cells(rows, positions), token_ids.to(torch.int32))

    def _cells(self, rows: Ints, positions: Ints) -> torch.Tensor:
        return torch.from_numpy(rows * self.width + positions).to(self.tokens.device)
