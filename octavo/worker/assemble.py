"""StepPlan → Batch, in a few whole-array operations: its cost hardly grows with the rows.
Knows nothing of models, attention or sampling."""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.batch import Batch
from octavo.messages import StepPlan
from octavo.sampling.state import Ints
from octavo.worker.rows import Rows


@dataclass(slots=True)
class Assembled:
    """A batch, and whom its S samples are for, in the order of the plan's True `samples`."""

    batch: Batch
    sample_rows: Ints  # [S]
    sample_lens: Ints  # [S] tokens the row holds once the step is done = position of the token to sample


def assemble(plan: StepPlan, rows: Rows) -> Assembled:
    """The plan must advance at least one row, and `rows` must have been updated with it."""
    plan_rows = np.array(plan.rows, dtype=np.int64)
    plan_counts = np.array(plan.counts, dtype=np.int64)
    plan_lens = np.array(plan.starts, dtype=np.int64) + plan_counts
    samples = np.array(plan.samples, dtype=np.bool_)

    max_query_len = int(plan_counts.max())
    num_rows = len(plan_rows)
    if max_query_len == 1:  # steady decode: nothing to sort, nothing to repeat
        batch_rows, lens, counts = plan_rows, plan_lens, plan_counts
        query_start = np.arange(num_rows + 1)
        token_rows, positions = batch_rows, lens - 1
        last = query_start[:-1]
        num_decodes = num_rows
    else:
        order = np.argsort(plan_counts != 1, kind="stable")  # one-token rows first, otherwise as planned
        batch_rows, lens, counts = plan_rows[order], plan_lens[order], plan_counts[order]
        query_start = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        token_rows = np.repeat(batch_rows, counts)
        positions = np.arange(query_start[-1]) + np.repeat(lens - query_start[1:], counts)
        last = np.empty(num_rows, dtype=np.int64)
        last[order] = query_start[1:] - 1
        num_decodes = int((counts == 1).sum())

    max_seq_len = int(lens.max())
    pages = rows.page_table[token_rows, positions // rows.page_size].astype(np.int64)
    max_pages = -(-max_seq_len // rows.page_size)
    device = rows.tokens.device

    def put(column: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> torch.Tensor:
        return torch.from_numpy(column).to(device, non_blocking=True)

    batch = Batch(
        input_ids=rows.read(token_rows, positions),
        positions=put(positions),
        slots=put(pages * rows.page_size + positions % rows.page_size),
        query_start=put(query_start.astype(np.int32)),
        seq_lens=put(lens.astype(np.int32)),
        page_table=put(rows.page_table[batch_rows, :max_pages]),
        sample_at=put(last[samples]),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        query_lens_host=counts.tolist(),
        seq_lens_host=lens.tolist(),
    )
    return Assembled(batch, plan_rows[samples], plan_lens[samples])
