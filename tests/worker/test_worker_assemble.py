"""A plan's batch, field by field, against one built with loops."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.device import pick
from octavo.messages import NO_INPUT, Draft, Entering, SamplingParams, StepPlan
from octavo.sampling.state import SamplingState
from octavo.worker.assemble import Columns, TokenRows, assemble, shared_len
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging

MAX_ROWS, MAX_LEN, VOCAB = 9, 60, 1000
PARAMS = SamplingParams()
CPU = pick("cpu")


def random_rows(rng: random.Random, page_size: int) -> tuple[RowState, list[list[int]], list[list[int]]]:
    """Full rows: (rows, tokens of each, pages of each)."""
    rows = RowState(MAX_ROWS, MAX_LEN, page_size, VOCAB, CPU, Staging(CPU))
    num_pages = -(-MAX_LEN // page_size)
    free = rng.sample(range(1, 5 * MAX_ROWS * num_pages), MAX_ROWS * num_pages)
    tokens = [[rng.randrange(VOCAB) for _ in range(MAX_LEN)] for _ in range(MAX_ROWS)]
    pages = [[free.pop() for _ in range(num_pages)] for _ in range(MAX_ROWS)]
    enters = [Entering(row, tokens[row], 1, PARAMS, 0, [], [pages[row]]) for row in range(MAX_ROWS)]
    rows.update(StepPlan(0, [], enters, [], [], [], [], [], [], [], []))
    return rows, tokens, pages


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_batch_is_what_the_plan_says(seed: int, only_decodes: bool) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 3, 16])
    rows, tokens, pages = random_rows(rng, page_size)
    plan_rows = rng.sample(range(MAX_ROWS), rng.randint(1, MAX_ROWS))
    counts = [1 if only_decodes else rng.choice([1, 1, 2, rng.randint(1, 20)]) for _ in plan_rows]
    starts = [rng.randint(0, MAX_LEN - count) for count in counts]
    samples = [rng.random() < 0.7 for _ in plan_rows]
    plan = StepPlan(1, [], [], [], plan_rows, starts, counts, samples, [], [], [])
    assembled = assemble(Columns.of(plan), rows, Staging(CPU))
    batch = assembled.batch

    order = sorted(range(len(plan_rows)), key=lambda i: counts[i] != 1)
    cells = [(plan_rows[i], position) for i in order for position in range(starts[i], starts[i] + counts[i])]
    ends = [starts[i] + counts[i] for i in order]
    assert batch.num_decodes == counts.count(1)
    assert batch.input_ids.tolist() == [tokens[row][position] for row, position in cells]
    assert batch.positions.tolist() == [position for _, position in cells]
    assert batch.slots.tolist() == [
        pages[row][position // page_size] * page_size + position % page_size for row, position in cells
    ]
    assert batch.seq_lens.tolist() == batch.seq_lens_host == ends
    assert batch.query_lens_host == [counts[i] for i in order]
    assert batch.query_start.tolist() == [sum(batch.query_lens_host[:i]) for i in range(len(order) + 1)]
    assert (batch.max_query_len, batch.max_seq_len) == (max(counts), max(ends))
    width = -(-max(ends) // page_size)
    assert batch.page_table.tolist() == [pages[plan_rows[i]][:width] for i in order]
    for tensor in (batch.input_ids, batch.positions, batch.slots, batch.sample_at):
        assert tensor.dtype == torch.int64
    for tensor in (batch.query_start, batch.seq_lens, batch.page_table):
        assert tensor.dtype == torch.int32

    # Samples come in the plan's order, whatever the batch's is.
    sampled = [i for i in range(len(plan_rows)) if samples[i]]
    assert assembled.sample_rows.tolist() == [plan_rows[i] for i in sampled]
    assert assembled.sample_lens.tolist() == [starts[i] + counts[i] for i in sampled]
    last_cells = [cells[at] for at in batch.sample_at.tolist()]
    assert last_cells == [(plan_rows[i], starts[i] + counts[i] - 1) for i in sampled]


def test_written_tokens_are_read_back_and_pages_of_the_last_occupant_are_gone() -> None:
    rows, tokens, pages = random_rows(random.Random(5), 16)
    cells = torch.from_numpy(rows.cells(np.array([3, 0]), np.array([7, MAX_LEN])))
    rows.tokens.view(-1).index_copy_(0, cells, torch.tensor([901, 902], dtype=torch.int32))
    assert [rows.tokens[3, 7], rows.tokens[3, 8], rows.tokens[0, MAX_LEN]] == [901, tokens[3][8], 902]

    entering = Entering(3, [4, 5], 2, PARAMS, 0, [], [[11]])
    rows.update(StepPlan(1, [3], [entering], [], [], [], [], [], [3, 0], [1, 0], [12, 13]))
    assert rows.page_table[3].tolist() == [11, 12, 0, 0]
    assert rows.page_table[0].tolist() == [13, *pages[0][1:]]
    assert rows.tokens[3, :2].tolist() == [4, 5]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_groups_have_page_tables_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    rows = RowState(MAX_ROWS, MAX_LEN, 4, VOCAB, CPU, Staging(CPU), (0, 8, 8))
    tables = [[[rng.randrange(1, 999) for _ in range(10)] for _ in range(MAX_ROWS)] for _ in range(3)]
    for table in tables[1:]:  # windows have passed these
        table[2][:4] = [0] * 4
    enters = [Entering(row, [5] * 40, 1, PARAMS, 0, [], [table[row] for table in tables]) for row in range(MAX_ROWS)]
    changes = sorted({(rng.randrange(3), rng.randrange(MAX_ROWS), rng.randrange(5, 12)) for _ in range(9)})
    ids = [rng.randrange(1, 999) for _ in changes]
    groups, changed, slots = (list(column) for column in zip(*changes, strict=True))
    for (group, row, slot), page in zip(changes, ids, strict=True):
        tables[group][row] += [0] * (slot + 1 - len(tables[group][row]))
        tables[group][row][slot] = page
    if rng.random() < 0.5:
        rows.update(StepPlan(0, [], enters, [], [], [], [], [], changed, slots, ids, groups))
    else:  # as for a graph's step: where the pages go in the flattened tables
        rows.update(StepPlan(0, [], enters, [], [], [], [], [], [], [], []))
        cells, pages = rows.note_pages(StepPlan(0, [], [], [], [], [], [], [], changed, slots, ids, groups))
        assert rows.page_tables.reshape(-1)[cells].tolist() == pages == ids
    plan_rows = rng.sample(range(MAX_ROWS), 4)
    plan = StepPlan(1, [], [], [], plan_rows, [32, 35, 30, 21], [1, 1, 3, 9], [True] * 4, [], [], [])
    batch = assemble(Columns.of(plan), rows, Staging(CPU)).batch
    assert len(batch.groups) == 3
    for part, table in zip(batch.groups, tables, strict=True):
        assert part.page_table.tolist() == [table[row][:9] for row in plan_rows]
        row_of = np.repeat(plan_rows, [1, 1, 3, 9])
        assert part.slots.tolist() == [
            table[row][position // 4] * 4 + position % 4
            for row, position in zip(row_of, batch.positions.tolist(), strict=True)
        ]
        assert part.positions is batch.positions
    assert batch.slots.data_ptr() == batch.groups[0].slots.data_ptr()


def test_shared_pages_are_found_where_they_pay() -> None:
    table = np.arange(20 * 40, dtype=np.int32).reshape(20, 40)
    rows = np.arange(3, 15)
    table[rows, :30] = np.arange(1000, 1030)
    lens = np.full(12, 16 * 31 + 3)
    assert shared_len(table, rows, lens, 16) == 30 * 16
    assert shared_len(table, rows[:7], lens[:7], 16) == 0, "too few rows"
    assert shared_len(table, rows, np.full(12, 16 * 20), 16) == 19 * 16, "the last token of a row is its own"
    assert shared_len(table, rows, np.full(12, 200), 16) == 0, "too few tokens"
    table[rows[5], 17] = 7
    assert shared_len(table, rows, lens, 16) == 17 * 16
    table[rows[2], 0] = 8
    assert shared_len(table, rows, lens, 16) == 0


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_tokens_of_a_step_that_is_replayed(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.sample(range(MAX_ROWS), rng.randint(1, MAX_ROWS))
    starts = [rng.randrange(30) for _ in rows]
    drafts = [Draft(at, [at] * rng.randint(1, 4)) for at in range(len(rows)) if rng.random() < 0.4]
    counts = [1] * len(rows)
    for draft in drafts:
        counts[draft.at] += len(draft.tokens)
    plan = StepPlan(0, [], [], [], rows, starts, counts, [True] * len(rows), [], [], [], drafts=drafts)
    found = TokenRows.of(plan)
    assert found is not None
    of_rows, lens = Columns.of(plan).by_token()
    assert (found.rows, found.lens) == (of_rows.tolist(), lens.tolist())
    tokens = {draft.at: draft.tokens for draft in drafts}
    given = [token for at in range(len(rows)) for token in (NO_INPUT, *tokens.get(at, ()))]
    assert found.drafted == (given if drafts else None)
    at = rng.randrange(len(rows))
    samples, more = [True] * len(rows), [*counts]
    samples[at], more[at] = False, counts[at] + 1
    columns = (counts, samples), (more, [True] * len(rows)), ([], [])
    for count, sample in columns:
        other = StepPlan(0, [], [], [], rows[: len(count)], starts, count, sample, [], [], [], drafts=drafts)
        assert TokenRows.of(other) is None


def test_which_rows_take_the_likeliest_token() -> None:
    state = SamplingState(8, VOCAB)
    plain = SamplingParams(temperature=0.0)
    kinds = [
        {},
        {"temperature": 0.7},
        {"repetition_penalty": 1.2},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 3},
        {"temperature": 0.7, "top_k": 1},
    ]
    for row, kind in enumerate(kinds):
        state.enter(row, SamplingParams(**{"temperature": 0.0, **kind}), 0, 5, [])
    taken = [state.is_only_greedy([0, row], [5, 7]) for row in range(len(kinds))]
    assert taken == [True, False, False, False, False, False, True]
    assert state.is_only_greedy([0, 5], [5, 8]), "it may stop from here on"
    for row in range(len(kinds)):
        state.enter(row, plain, 0, 5, [])
    assert state.is_only_greedy(list(range(len(kinds))), [5] * len(kinds)), "others have their rows now"
