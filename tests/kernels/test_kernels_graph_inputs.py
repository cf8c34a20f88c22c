"""A decode step's pinned inputs, gathered inputs and returned tokens against plain indexing."""

import pytest
import torch

from octavo.kernels.triton.runtime.graph_inputs import NUM_SLOTS, InputSlot, gather_inputs, receive, scatter_tokens
from tests.interpreter import mend

MAX_ROWS, WIDTH, PAGES, PAGE_SIZE = 6, 70, 9, 8
LETTER = InputSlot(MAX_ROWS, 17)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    mend(monkeypatch)


@pytest.fixture
def tables(device):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 1000, (MAX_ROWS, WIDTH), generator=generator, dtype=torch.int32)
    pages = torch.randint(1, 500, (MAX_ROWS, PAGES), generator=generator, dtype=torch.int32)
    return tokens.to(device), pages.to(device)


def write(letter: torch.Tensor, rows, lens, prefix_len, changes, given) -> None:
    layout = LETTER
    letter[layout.given : layout.given + len(given)] = torch.tensor(given, dtype=torch.int32)
    assert letter.shape == (layout.size,)
    letter[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    letter[layout.lens : layout.lens + len(lens)] = torch.tensor(lens, dtype=torch.int32)
    letter[layout.prefix_len], letter[layout.num_changes] = prefix_len, len(changes)
    for i, (cell, page) in enumerate(changes):
        letter[layout.cells + i], letter[layout.pages + i] = cell, page


def test_letters_are_read_in_turn_and_change_the_page_table(device, tables):
    pages = torch.stack((tables[1], tables[1] + 500))  # of two groups of layers, one after the other
    pin = device.type == "cuda"
    letters = torch.full((NUM_SLOTS, LETTER.size), -7, dtype=torch.int32, pin_memory=pin)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    rows, lens, given = (torch.full((4,), -9, dtype=torch.int32, device=device) for _ in range(3))
    prefix_len = torch.full((1,), -1, dtype=torch.int32, device=device)
    expected = pages.cpu().clone()
    for step in range(NUM_SLOTS + 2):
        changes = [(step, 900 + step), (MAX_ROWS * PAGES + step, 700 + step)][: step % 3]
        write(letters[step % NUM_SLOTS], [3, 1, 0, 5], [9, step, 0, 17], 16 * step, changes, [-1, step, -1, 7])
        receive(letters, slot, rows, lens, given, prefix_len, pages, LETTER)
        for cell, page in changes:
            expected.view(-1)[cell] = page
        assert rows.tolist() == [3, 1, 0, 5] and lens.tolist() == [9, step, 0, 17]
        assert given.tolist() == [-1, step, -1, 7]
        assert prefix_len.item() == 16 * step and slot.item() == (step + 1) % NUM_SLOTS
        assert torch.equal(pages.cpu(), expected)


def test_inputs_come_from_the_tables_and_padding_writes_nowhere(device, tables):
    tokens, pages = tables
    rows, lens, given = ([4, 0, 2, 0], [17, 1, 64, 0], [-1, 77, -1, 5])
    before = tokens.clone()
    before[0, 0] = 77  # a drafted token, which goes to the table; padding has none
    out = {name: torch.full((4,), -9, dtype=torch.int64, device=device) for name in ("input_ids", "positions", "slots")}
    seq_lens = torch.full((4,), -9, dtype=torch.int32, device=device)
    page_table = torch.full((4, PAGES), -9, dtype=torch.int32, device=device)
    on_device = [torch.tensor(column, dtype=torch.int32, device=device) for column in (rows, lens, given)]
    gather_inputs(*on_device, tokens, pages, PAGE_SIZE, **out, seq_lens=seq_lens, page_table=page_table)
    assert seq_lens.tolist() == lens and torch.equal(tokens, before)
    assert out["slots"][3] == -1 and out["input_ids"][3] == 0
    for i, (row, length) in enumerate(zip(rows[:3], lens[:3], strict=True)):
        position = length - 1
        assert out["positions"][i] == position
        assert out["input_ids"][i] == tokens[row, position]
        assert out["slots"][i] == pages[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        used = -(-length // PAGE_SIZE)
        assert torch.equal(page_table[i, :used], pages[row, :used]) and (page_table[i, used:] == -9).all()


def test_tokens_go_behind_their_rows_and_home(device, tables):
    tokens, _ = tables
    before = tokens.clone()
    pin = device.type == "cuda"
    host_tokens = torch.full((NUM_SLOTS, MAX_ROWS), -3, dtype=torch.int32, pin_memory=pin)
    slot = torch.zeros(1, dtype=torch.int32, device=device)  # input slot 0 is next: the step used the ring's last slot
    rows, lens = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([4, 0, 2], [17, 1, 0]))
    scatter_tokens(rows, lens, torch.tensor([501, 502, 503], device=device), tokens, host_tokens, slot)
    if pin:
        torch.cuda.synchronize()
    before[4, 17], before[0, 1] = 501, 502
    assert torch.equal(tokens, before)
    assert host_tokens[NUM_SLOTS - 1, :3].tolist() == [501, 502, 503] and (host_tokens[: NUM_SLOTS - 1] == -3).all()


def test_a_row_may_be_there_for_each_of_its_tokens_and_keep_the_last_sample_alone(device, tables):
    tokens, pages = tables
    rows, lens = [-1 - 4, 4, -1 - 0], [9, 10, 3]
    columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in (rows, lens)]
    out = {name: torch.full((3,), -9, dtype=torch.int64, device=device) for name in ("input_ids", "positions", "slots")}
    seq_lens = torch.full((3,), -9, dtype=torch.int32, device=device)
    page_table = torch.full((3, PAGES), -9, dtype=torch.int32, device=device)
    given = torch.full((3,), -1, dtype=torch.int32, device=device)
    gather_inputs(*columns, given, tokens, pages, PAGE_SIZE, **out, seq_lens=seq_lens, page_table=page_table)
    assert out["positions"].tolist() == [8, 9, 2]
    assert out["input_ids"].tolist() == [tokens[4, 8], tokens[4, 9], tokens[0, 2]]
    assert out["slots"].tolist() == [
        pages[r, p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for r, p in ((4, 8), (4, 9), (0, 2))
    ]
    before = tokens.clone()
    host_tokens = torch.full((NUM_SLOTS, MAX_ROWS), -3, dtype=torch.int32, pin_memory=device.type == "cuda")
    slot = torch.ones(1, dtype=torch.int32, device=device)
    scatter_tokens(*columns, torch.tensor([501, 502, 503], device=device), tokens, host_tokens, slot)
    if device.type == "cuda":
        torch.cuda.synchronize()
    before[4, 10] = 502
    assert torch.equal(tokens, before)
    assert host_tokens[0, :3].tolist() == [501, 502, 503]
