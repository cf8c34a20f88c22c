"""StepPlan → Batch, in a few whole-array operations, so that the cost hardly grows with the number of rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from octavo.batch import Batch
from octavo.messages import NO_INPUT, StepPlan
from octavo.sampling.state import Ints
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging

# Below these sizes, reading a shared prefix once for all rows saves less than its extra launches cost.
_MIN_SHARING_ROWS = 8
_MIN_SHARED_TOKENS = 256


@dataclass(slots=True)
class Assembled:
    """A batch and the rows of its S samples, in the order of the plan's True `samples`. A row with a draft has several."""

    batch: Batch
    sample_rows: Ints  # [S]
    sample_lens: Ints  # [S] tokens before the sample = position of the token to sample
    sample_cells: torch.Tensor  # [S] int64: index of each sample in the flattened token table
    sample_last: Ints  # [S] index in T of the token that it is sampled after
    last: Ints  # [B] the same for every row, in the plan's order
    token_rows: Ints  # [T]
    positions: Ints  # [T]


@dataclass(slots=True)
class Columns:
    """A plan's rows as arrays [B], in the plan's order."""

    rows: Ints
    counts: Ints
    lens: Ints  # tokens that each row holds after the step
    samples: "np.ndarray[tuple[int], np.dtype[np.bool_]]"
    num_drafted: Ints | None = None  # of `counts`: the last so many are a draft; None: there are no drafts

    @classmethod
    def of(cls, plan: StepPlan) -> "Columns":
        counts = np.array(plan.counts, dtype=np.int64)
        num_drafted: Ints | None = None
        if plan.drafts:
            num_drafted = np.zeros(len(counts), dtype=np.int64)
            num_drafted[[draft.at for draft in plan.drafts]] = [len(draft.tokens) for draft in plan.drafts]
        return cls(
            np.array(plan.rows, dtype=np.int64),
            counts,
            np.array(plan.starts, dtype=np.int64) + counts,
            np.array(plan.samples, dtype=np.bool_),
            num_drafted,
        )

    def per_sample(self, values: Ints) -> Ints:
        """[B] → [S]: the value of each sample's row."""
        chosen: Ints = values[self.samples]
        return chosen if self.num_drafted is None else np.repeat(chosen, 1 + self.num_drafted[self.samples])

    def back(self) -> Ints | int:
        """[S] how far before its row's last token each sample is taken."""
        if self.num_drafted is None:
            return 0
        counts = 1 + self.num_drafted[self.samples]
        ends = np.cumsum(counts)
        found: Ints = np.repeat(ends, counts) - 1 - np.arange(ends[-1] if len(ends) else 0)
        return found

    def by_token(self) -> "tuple[Ints, Ints]":
        """[T] each: the step's tokens as if each was of a row of its own: (rows, tokens that the row holds up to this one)."""
        ends = np.cumsum(self.counts)
        lens: Ints = np.arange(ends[-1]) + np.repeat(self.lens - ends + 1, self.counts)
        return np.repeat(self.rows, self.counts), lens


class TokenRows(NamedTuple):
    """The tokens of a step in which every row computes its last one, and maybe a draft, as if each was of a row of its own [T]. Such steps
    are replayed, and their launch is what a GPU waits for: these are lists, which for a few rows take less time than arrays."""

    rows: list[int]
    lens: list[int]  # tokens that the row holds up to this one
    drafted: list[int] | None  # the token itself, if it is a draft, else NO_INPUT; None: there are no drafts

    @classmethod
    def of(cls, plan: StepPlan) -> "TokenRows | None":
        """None: it is another kind of step."""
        if not plan.rows or not all(plan.samples):
            return None
        if not plan.drafts:
            return cls(plan.rows, [start + 1 for start in plan.starts], None) if max(plan.counts) == 1 else None
        drafts = {draft.at: draft.tokens for draft in plan.drafts}
        rows: list[int] = []
        lens: list[int] = []
        drafted: list[int] = []
        for at, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            tokens = drafts.get(at, ())
            if count != 1 + len(tokens):
                return None
            rows += [row] * count
            lens += range(start + 1, start + 1 + count)
            drafted.append(NO_INPUT)
            drafted += tokens
        return cls(rows, lens, drafted)


def shared_len(
    page_table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", rows: Ints, lens: Ints, page_size: int
) -> int:
    """Number of leading tokens that all rows hold in the same pages; 0 with too few rows or tokens to be worth using."""
    if len(rows) < _MIN_SHARING_ROWS:
        return 0
    most = (int(lens.min()) - 1) // page_size
    if most * page_size < _MIN_SHARED_TOKENS or (page_table[rows, 0] != page_table[rows[0], 0]).any():
        return 0
    is_same = (page_table[rows, :most] == page_table[rows[0], :most]).all(axis=0)
    num_pages = most if is_same.all() else int(np.argmin(is_same))
    return num_pages * page_size if num_pages * page_size >= _MIN_SHARED_TOKENS else 0


def shared_in(tables: RowState, rows: Ints | list[int], lens: Ints | list[int]) -> int:
    """The smallest shared_len over the groups that keep all pages. Groups with a window soon stop reading the prefix."""
    if len(rows) < _MIN_SHARING_ROWS:
        return 0
    rows, lens = np.asarray(rows), np.asarray(lens)
    return min([shared_len(table, rows, lens, tables.page_size) for table in tables.unwindowed_tables], default=0)


@dataclass(slots=True)
class _Layout:
    """The plan's B rows in the batch's order, one-token rows first, and their T tokens."""

    rows: Ints  # [B]
    lens: Ints  # [B]
    counts: Ints  # [B]
    query_start: Ints  # [B + 1]
    last: Ints  # [B] index in T of each row's last token, in the plan's order
    token_rows: Ints  # [T]
    positions: Ints  # [T]
    num_decodes: int

    @classmethod
    def of(cls, columns: Columns, adapters: Ints | None = None) -> "_Layout":
        """`adapters`: [B] a number for each row's adapter: rows with the same one become neighbours. None: no row has one."""
        num_rows = len(columns.rows)
        if adapters is None and int(columns.counts.max()) == 1:  # steady decode: nothing to sort or repeat
            start = np.arange(num_rows + 1)
            rows, lens = columns.rows, columns.lens
            return cls(rows, lens, columns.counts, start, start[:-1], rows, lens - 1, num_rows)
        if adapters is None:
            order = np.argsort(columns.counts != 1, kind="stable")  # keeps the plan's order otherwise
        else:
            order = np.lexsort((adapters, columns.counts != 1))  # stable, too
        rows, lens, counts = columns.rows[order], columns.lens[order], columns.counts[order]
        start = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=start[1:])
        positions = np.arange(start[-1]) + np.repeat(lens - start[1:], counts)
        last = np.empty(num_rows, dtype=np.int64)
        last[order] = start[1:] - 1
        return cls(rows, lens, counts, start, last, np.repeat(rows, counts), positions, int((counts == 1).sum()))


def adapters_of(these: Ints | list[int], rows: RowState) -> tuple[tuple[str, ...], Ints | None]:
    """The adapters of these rows, and the number of each row's: −1: none. (), None: no row has one."""
    if not rows.adapters:
        return (), None
    names = [rows.adapters.get(row, "") for row in (these if isinstance(these, list) else these.tolist())]
    numbers = {name: number for number, name in enumerate(sorted({*names} - {""}))}
    if not numbers:
        return (), None
    return tuple(numbers), np.array([numbers.get(name, -1) for name in names], dtype=np.int64)


def _second_texts(layout: _Layout, rows: RowState) -> "np.ndarray[tuple[int], np.dtype[np.bool_]] | None":
    """[T] which tokens are of the second text of a pair; None: no row has a pair."""
    pooling = [rows.pooling.get(row) for row in layout.rows.tolist()]
    begins = np.array([0 if each is None else each.second_at for each in pooling], dtype=np.int64)
    if not begins.any():
        return None
    of_tokens = np.repeat(begins, layout.counts)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (of_tokens > 0) & (layout.positions >= of_tokens)
    return found


def assemble(columns: Columns, rows: RowState, staging: Staging) -> Assembled:
    """Build the batch. The plan must advance at least one row, and `rows` must be updated with it already."""
    adapters, of_rows = adapters_of(columns.rows, rows)
    layout, page_size = _Layout.of(columns, of_rows), rows.page_size
    positions, lens, num_decodes = layout.positions, layout.lens, layout.num_decodes
    one_group, entries = rows.num_groups == 1, positions // page_size
    if one_group:
        pages = rows.page_table[layout.token_rows, entries].astype(np.int64)
    else:  # [G, T], contiguous for each group
        pages = rows.page_tables[:, layout.token_rows, entries].astype(np.int64, order="C")
    back = columns.back()
    sample_rows, sample_lens = columns.per_sample(columns.rows), columns.per_sample(columns.lens) - back
    sample_last = columns.per_sample(layout.last) - back
    shared = shared_in(rows, layout.rows[:num_decodes], lens[:num_decodes])
    cells, positions_there, slots, query_start, lens_there, rows_there, sample_at, sample_cells, prefix_len = (
        staging.send(
            [
                rows.cells(layout.token_rows, positions),
                positions,
                pages * page_size + positions % page_size,
                layout.query_start.astype(np.int32),
                lens.astype(np.int32),
                layout.rows,
                sample_last,
                rows.cells(sample_rows, sample_lens),
                np.array([shared], dtype=np.int32),
            ]
        )
    )
    max_seq_len = int(lens.max())
    num_pages = -(-max_seq_len // page_size)
    batch = Batch(
        input_ids=rows.tokens.view(-1).index_select(0, cells).long(),
        positions=positions_there,
        slots=slots if one_group else slots[0],
        query_start=query_start,
        seq_lens=lens_there,
        page_table=rows.device_page_table[:, :num_pages].index_select(0, rows_there),
        sample_at=sample_at,
        max_query_len=int(layout.counts.max()),
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        query_lens_host=layout.counts.tolist(),
        seq_lens_host=lens.tolist(),
        prefix_len=prefix_len if shared else None,
    )
    if of_rows is not None:
        number_of = dict(zip(columns.rows.tolist(), of_rows.tolist(), strict=True))
        batch.adapters = adapters
        of_tokens = np.array([number_of[row] for row in layout.rows.tolist()], dtype=np.int32)
        batch.adapter_of = torch.from_numpy(np.repeat(of_tokens, layout.counts))
    if rows.pooling and (is_second := _second_texts(layout, rows)) is not None:
        batch.is_second = torch.from_numpy(is_second).to(positions_there.device)
    if not one_group:
        batch = batch.in_groups(slots, rows.device_page_tables[:, :, :num_pages].index_select(1, rows_there))
    return Assembled(
        batch, sample_rows, sample_lens, sample_cells, sample_last, layout.last, layout.token_rows, positions
    )
