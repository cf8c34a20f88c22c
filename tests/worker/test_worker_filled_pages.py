"""FilledPages against a store that remembers what was written to each slot, and behind which tokens."""

import random

import numpy as np

from octavo.device import pick
from octavo.messages import Entering, PageMove, SamplingParams, StepPlan
from octavo.worker.draft_model import FilledPages
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging

PAGE_SIZE, NUM_PAGES, NUM_HOST_PAGES, NUM_ROWS = 4, 48, 12, 3


class Store:
    """Rows that come, go on with drafts and without, are copied, swapped, and go; pages of those that went are used again, or shared."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        device = pick("cpu", 0)
        self.rows = RowState(NUM_ROWS, 80, PAGE_SIZE, 50, device, Staging(device), samples=False)
        self.filled = FilledPages(self.rows, NUM_ROWS, NUM_PAGES, NUM_HOST_PAGES)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, slot) → tokens up to the one written there
        self.tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.pages: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.left: list[tuple[list[int], list[int]]] = []  # tokens and full pages of rows that went
        self.num_drafts = self.num_known = 0

    def check(self, row: int, length: int) -> int:
        """What it says of a row, which must be true."""
        known = self.filled.of_row(row, length)
        for position in range(known):
            page, slot = self.pages[row][position // PAGE_SIZE], position % PAGE_SIZE
            assert self.slots.get((page, slot)) == tuple(self.tokens[row][: position + 1]), (row, position)
        return known

    def free_pages(self) -> list[int]:
        used = {page for pages in self.pages for page in pages}
        free = [page for page in range(NUM_PAGES) if page not in used]
        self.r.shuffle(free)
        return free

    def step(self, row: int) -> None:
        r, tokens = self.r, self.tokens[row]
        enters, moves, page_rows, entries, ids = [], [], [], [], []
        if not tokens or len(tokens) > 30:
            if tokens:
                self.left = [*self.left[-2:], (list(tokens), list(self.pages[row]))]
            self.pages[row] = []
            tokens = self.tokens[row] = [r.randrange(3) for _ in range(r.randrange(1, 9))]
            start = 0
            if self.left and r.random() < 0.7:  # a prefix of one that went, whose pages nothing has used since
                before, pages = r.choice(self.left)
                count = r.randrange((len(before) - 1) // PAGE_SIZE + 1)
                if not {page for held in self.pages for page in held}.intersection(pages[:count]):
                    tokens[:0], self.pages[row], start = before[: count * PAGE_SIZE], pages[:count], count * PAGE_SIZE
            need = len(tokens) // PAGE_SIZE + 3 - len(self.pages[row])
            own = self.free_pages()[: max(0, need)]
            self.left = [each for each in self.left if not set(each[1]).intersection(own)]
            self.pages[row] += own
            enters.append(Entering(row, tokens, len(tokens), SamplingParams(), 0, [], [self.pages[row]]))
        else:
            start = len(tokens) - 1
            more = max(0, (len(tokens) + 5) // PAGE_SIZE + 1 - len(self.pages[row]))
            own = self.free_pages()[:more]
            if r.random() < 0.2:  # its last page becomes another, by a copy or by way of the host
                source, target, host = (
                    self.pages[row][start // PAGE_SIZE],
                    self.free_pages()[-1],
                    r.randrange(NUM_HOST_PAGES),
                )
                own = [page for page in self.free_pages() if page != target][:more]
                moves = [PageMove("copy", source, target)]
                if r.random() < 0.5:
                    moves = [PageMove("out", source, host), PageMove("in", host, target)]
                for slot in range(PAGE_SIZE):
                    self.slots.pop((target, slot), None)
                    if (source, slot) in self.slots:
                        self.slots[target, slot] = self.slots[source, slot]
                self.pages[row][start // PAGE_SIZE] = target
                page_rows, entries, ids = [row], [start // PAGE_SIZE], [target]
                self.left = [each for each in self.left if target not in each[1]]
            self.left = [each for each in self.left if not set(each[1]).intersection(own)]
            for page in own:
                page_rows.append(row)
                entries.append(len(self.pages[row]))
                ids.append(page)
                self.pages[row].append(page)
        num_drafted = r.randrange(4) if start == len(tokens) - 1 and r.random() < 0.6 else 0
        count = len(tokens) - start + num_drafted
        plan = StepPlan(0, [], enters, moves, [row], [start], [count], [True], page_rows, entries, ids)
        self.filled.move(moves)
        self.rows.update(plan)
        self.filled.written(plan)
        run = [r.randrange(3) for _ in range(1 + num_drafted)]
        if num_drafted:
            known = self.check(row, start)
            self.num_drafts, self.num_known = self.num_drafts + 1, self.num_known + known
            drafts = [token if r.random() < 0.6 else 9 for token in run[:-1]]
            seen = [*tokens, *drafts]
            for position in range(known, start + num_drafted):
                self.slots[self.pages[row][position // PAGE_SIZE], position % PAGE_SIZE] = tuple(seen[: position + 1])
            self.filled.computed(row, start + num_drafted)
            wrong = next((at for at, token in enumerate(drafts) if token == 9), num_drafted)
            run = run[: wrong + 1]
        self.tokens[row] = [*tokens, *run[: 1 + num_drafted]]


def test_what_it_says_is_computed_is():
    num_drafts = num_known = 0
    for seed in range(60):
        store = Store(seed)
        for _ in range(120):
            store.step(store.r.randrange(NUM_ROWS))
        num_drafts, num_known = num_drafts + store.num_drafts, num_known + store.num_known
    assert num_drafts > 1000 and num_known > 5 * num_drafts, "it would be true of nothing, too"


def test_forgotten_pages_are_computed_again():
    store = Store(1)
    store.filled.of_page[:] = PAGE_SIZE
    store.rows.page_table[0, :3] = [5, 7, 9]
    store.filled.forget([7])
    assert store.filled.of_row(0, 11) == PAGE_SIZE
    assert np.count_nonzero(store.filled.of_page) == NUM_PAGES - 1
