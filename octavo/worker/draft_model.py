"""DraftModel: a smaller model of the same vocabulary that proposes the tokens which a step verifies (decision 048).

It reads the token table and the page tables of the model that it drafts for, and has pages of its own with the same numbers. So what the
scheduler does to a request's pages (shares, copies, swaps, gives back) is done to both. The draft model does not run in every step: it computes
a row's tokens when it is asked for a draft, from the first on that it lacks. For each page it is known how many of its tokens the draft
model has; a prefix that it has computed for one request is there for the next.

A wrong key or value in its pages would cost a draft, and never a token: drafts are verified."""

import time
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from octavo.batch import Batch
from octavo.kernels.cpu.native import Native
from octavo.layers.model import DecoderModel
from octavo.messages import FROM_MODEL, Draft, DraftWork, PageMove, StepPlan
from octavo.sampling.grammar.masks import Grammars
from octavo.sampling.sampler import sample
from octavo.sampling.state import Ints
from octavo.worker.assemble import Assembled, Columns, assemble, shared_in
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.graphs import Graphs
from octavo.worker.pages import Pages
from octavo.worker.rows import NO_CHANGES, RowState
from octavo.worker.staging import Staging

_UNKNOWN = -1


class Guesses(NamedTuple):
    """What one pass of a draft model has sampled."""

    tokens: list[int]  # of each sampling row
    unmasked: list[int]  # indices of those that were sampled without the mask of their row's grammar, which was late


class Replayed(NamedTuple):
    """A pass that a graph computes. Its tokens are on the host when it is done."""

    tokens: torch.Tensor  # [T] int32
    sampled: Ints  # indices of those that count


class FilledPages:
    """How much of each page, and of each row, the draft model has computed.

    Of a page: so many of its first slots. The count is cut where the other model writes, and grows as the draft model does. Slots behind the
    last token that counts may be counted although a draft was wrong: the next token that is written there cuts them off before they are
    used."""

    def __init__(self, rows: RowState, num_rows: int, num_pages: int, num_host_pages: int) -> None:
        self._rows, self._page_size = rows, rows.page_size
        self.of_page = np.zeros(num_pages, dtype=np.int32)  # slots
        self._of_host_page = np.zeros(max(1, num_host_pages), dtype=np.int32)
        self._of_row = np.full(num_rows, _UNKNOWN, dtype=np.int64)  # tokens; _UNKNOWN: its pages tell

    def move(self, moves: list[PageMove]) -> None:
        for move in moves:
            source = self._of_host_page if move.kind == "in" else self.of_page
            target = self._of_host_page if move.kind == "out" else self.of_page
            target[move.target] = source[move.source]

    def forget(self, pages: list[int]) -> None:
        """These pages get content that the draft model has not computed."""
        self.of_page[pages] = 0

    def written(self, plan: StepPlan) -> None:
        """The other model computes the positions of this plan. Its rows must have their pages already."""
        for entering in plan.enters:
            self._of_row[entering.row] = _UNKNOWN
        if not plan.rows:
            return
        rows, starts = np.array(plan.rows, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        table, page_size = self._rows.page_table, self._page_size
        first = starts // page_size
        pages = table[rows, first]
        self.of_page[pages] = np.minimum(self.of_page[pages], starts - first * page_size)
        last = (starts + counts - 1) // page_size
        for at in (last > first).nonzero()[0].tolist():
            self.of_page[table[rows[at], first[at] + 1 : last[at] + 1]] = 0
        self._of_row[rows] = np.minimum(self._of_row[rows], starts)

    def of_row(self, row: int, length: int) -> int:
        """How many of the row's first `length` tokens the draft model has computed."""
        known = int(self._of_row[row])
        if known == _UNKNOWN:
            filled = self.of_page[self._rows.page_table[row, : -(-length // self._page_size)]]
            short = (filled < self._page_size).nonzero()[0]
            known = length if not len(short) else int(short[0]) * self._page_size + int(filled[short[0]])
        self._of_row[row] = known = min(known, length)
        return known

    def computed(self, row: int, end: int) -> None:
        """The draft model has computed the row's tokens before `end`."""
        page_size = self._page_size
        first, last = int(self._of_row[row]) // page_size, (end - 1) // page_size
        pages = self._rows.page_table[row, first : last + 1]
        self.of_page[pages] = page_size
        self.of_page[pages[-1]] = end - last * page_size
        self._of_row[row] = end


class DraftModel:
    keeps_drafts = True
    """Whether a pass over a drafted token is right if the draft is."""
    reads_shared = True
    """Whether attention may read a prefix that all rows share once for all of them."""
    most_replayed = 4
    """Tokens of a row, in a pass that a graph computes: more are faster as a piece of a prompt."""

    def __init__(
        self,
        model: DecoderModel,
        steps: CpuSteps | None,
        native: Native | None,
        pages: Pages,
        rows: RowState,
        staging: Staging,
        filled: FilledPages,
        vocab_size: int,
        max_tokens: int,
        graphs: Graphs | None = None,
    ) -> None:
        """`steps`: None: its passes run operation by operation. `rows`, `vocab_size`: of the model that it drafts for. `max_tokens`: of a
        pass. `graphs`: on a GPU, of passes with few tokens of each row."""
        self.pages, self.filled, self.graphs = pages, filled, graphs
        self.model, self._steps, self._native = model, steps, native
        self._rows, self._staging = rows, staging
        self._vocab_size, self._max_tokens = vocab_size, max_tokens

    @property
    def stores(self) -> list[torch.Tensor]:
        """The memory of its pages."""
        return self.pages.layers

    def read(self, batch: Batch, features: torch.Tensor | None) -> None:
        """After the other model has computed a batch. `features`: [T, D] what was made of its hidden states; None: nothing."""

    def give_back(self, pages: list[int]) -> None:
        """Give the memory of these pages back to the system."""
        self.pages.give_back(pages)
        self.filled.forget(pages)

    def move(self, moves: list[PageMove]) -> None:
        """Before the step's other work, as the other model's pages."""
        self.pages.move(moves)
        self.filled.move(moves)

    def propose(self, plan: StepPlan) -> tuple[StepPlan, DraftWork | None]:
        """→ the plan with tokens in all of its drafts. A draft that has none has not caught up with its row. None: it has nothing to
        propose. `rows` must be updated with the plan already."""
        self.filled.written(plan)
        wanted = [draft for draft in plan.drafts if draft.tokens[:1] == [FROM_MODEL]]
        if not wanted:
            return plan, None
        started = time.perf_counter()
        proposed = _Proposal(self, plan, wanted)
        work = DraftWork(
            proposed.num_passes,
            proposed.num_tokens,
            proposed.context,
            proposed.num_caught_up,
            time.perf_counter() - started,
        )
        counts, drafts = plan.counts[:], {draft.at: draft for draft in plan.drafts}
        for draft, tokens in zip(wanted, proposed.tokens, strict=True):
            counts[draft.at] -= len(draft.tokens) - len(tokens)
            drafts[draft.at] = Draft(draft.at, tokens)
        return msgspec.structs.replace(plan, counts=counts, drafts=list(drafts.values())), work

    def behind(self, plan: StepPlan, drafts: list[Draft]) -> tuple[list[int], list[int]]:
        """(tokens that the draft model has of each row with one of these drafts, before the row's last; how many of the missing ones it
        may compute now)."""
        have, more = [], []
        left = self._max_tokens - len(drafts)
        for draft in drafts:
            start = plan.starts[draft.at]
            have.append(self.filled.of_row(plan.rows[draft.at], start))
            more.append(min(start - have[-1], draft.catch_up, left))
            left -= more[-1]
        return have, more

    @property
    def grammars(self) -> Grammars:
        return self._rows.sampling.grammars

    def compute(self, columns: Columns) -> Guesses:
        """One pass → a token for each sampling row, by the row's own seed, parameters and mask: what the other model would sample if it had
        these logits. The token table gets them, too."""
        assembled = assemble(columns, self._rows, self._staging)
        batch = assembled.batch
        if self._steps is not None:
            logits = self._steps.run(batch)
        else:
            hidden = self.model.forward(batch, None)
            logits = self.model.logits(hidden.index_select(0, batch.sample_at)) if len(batch.sample_at) else hidden[:0]
        if not len(batch.sample_at):
            return Guesses([], [])
        return self._sampled(_fitted(logits, self._vocab_size), assembled)

    def can_replay(self, columns: Columns) -> bool:
        """Whether a graph can compute this pass. Not where a row has a grammar: its mask depends on the token before."""
        if self.graphs is None or int(columns.counts.max()) > self.most_replayed:
            return False
        grammars = self.grammars.rows
        has_grammar = bool(grammars) and not grammars.keys().isdisjoint(columns.rows.tolist())
        return not has_grammar and self.graphs.can_run(int(columns.counts.sum()))

    def replay(self, columns: Columns) -> Replayed:
        """As compute(), by a graph and without waiting for it. The next pass finds the tokens in the token table."""
        graphs, tables = self.graphs, self._rows
        assert graphs is not None
        rows, lens = columns.by_token()
        is_last = np.zeros(len(rows), dtype=np.bool_)
        is_last[np.cumsum(columns.counts) - 1] = columns.samples
        of_rows, num_held = rows.tolist(), lens.tolist()
        is_greedy = tables.sampling.is_only_greedy(of_rows, num_held)
        shared = shared_in(tables, rows, lens) if self.reads_shared else 0
        kept = [row if is_kept else -1 - row for row, is_kept in zip(of_rows, is_last.tolist(), strict=True)]
        logits = graphs.run(kept, num_held, NO_CHANGES, shared, is_greedy)
        if logits is not None:
            fitted = _fitted(logits, self._vocab_size)
            graphs.store(sample(fitted, tables.tokens, tables.sampling, rows, lens))
        return Replayed(graphs.host_tokens(len(rows)), is_last.nonzero()[0])

    def wait(self, *passes: Replayed) -> list[list[int]]:
        """Wait until these passes are done. → the tokens that each has sampled."""
        done = self._staging.device.event()
        done.record()
        done.wait()
        return [each.tokens.numpy()[each.sampled].tolist() for each in passes]

    def _sampled(self, logits: torch.Tensor, assembled: Assembled) -> Guesses:
        """logits [S, V] → a token for each sample, which is also in the token table."""
        rows, lens = assembled.sample_rows, assembled.sample_lens
        masks = self.grammars.draft_masks(rows, lens)
        tokens = sample(logits, self._rows.tokens, self._rows.sampling, rows, lens, native=self._native, masks=masks)
        self._rows.tokens.view(-1).index_copy_(0, assembled.sample_cells, tokens.to(torch.int32))
        return Guesses(tokens.tolist(), [] if masks is None else masks.late)


class _Proposal:
    """The passes of one step."""

    def __init__(self, model: DraftModel, plan: StepPlan, drafts: list[Draft]) -> None:
        self.num_passes = self.num_tokens = self.context = self.num_caught_up = 0
        self.tokens: list[list[int]] = [[] for _ in drafts]
        self._num_drafted = [0] * len(drafts)  # with those of passes that were not collected yet
        self._replayed: list[tuple[list[int], Replayed]] = []  # (drafts that get a token, the pass)
        self._ended: set[int] = set()  # drafts that are to have no more tokens
        self._model, self._rows = model, [plan.rows[draft.at] for draft in drafts]
        ends = [plan.starts[draft.at] for draft in drafts]  # position of each row's next input
        wanted = [len(draft.tokens) for draft in drafts]
        have, more = model.behind(plan, drafts)
        self.num_caught_up = sum(more)
        has_all = [start + count == end for start, count, end in zip(have, more, ends, strict=True)]
        ready = [at for at in range(len(ends)) if has_all[at]]
        model.grammars.begin_drafts([self._rows[at] for at in ready], [ends[at] + 1 for at in ready])
        own = [int(each) for each in has_all]  # its own last token, behind all that were missing
        going = [at for at in range(len(ends)) if more[at] or own[at]]
        self._compute(going, have, [a + b for a, b in zip(more, own, strict=True)], has_all, is_sure=True)
        going = ready
        while going := [at for at in going if self._num_drafted[at] < wanted[at] and at not in self._ended]:
            starts = [end + count for end, count in zip(ends, self._num_drafted, strict=True)]
            self._compute(going, starts, [1] * len(ends), has_all, is_sure=model.keeps_drafts)
        self._collect()

    def _compute(
        self, going: list[int], starts: list[int], counts: list[int], samples: list[bool], is_sure: bool
    ) -> None:
        """Compute these rows from `starts` on, and sample behind those that have all of their tokens. `is_sure`: what is computed stays
        right if its tokens are."""
        if not going:
            return
        rows = [self._rows[at] for at in going]
        of_rows, of_starts, of_counts = (
            np.array(column, dtype=np.int64)
            for column in (rows, [starts[at] for at in going], [counts[at] for at in going])
        )
        ends: Ints = of_starts + of_counts
        sampling = [at for at in going if samples[at]]
        columns = Columns(of_rows, of_counts, ends, np.array([samples[at] for at in going], dtype=np.bool_))
        if self._model.can_replay(columns):
            self._replayed.append((sampling, self._model.replay(columns)))
            for at in sampling:
                self._num_drafted[at] += 1
        else:
            self._collect()
            self._take(sampling, self._model.compute(columns))
        if is_sure:
            for row, end in zip(rows, ends.tolist(), strict=True):
                self._model.filled.computed(row, end)
        self.num_passes += 1
        self.num_tokens += int(of_counts.sum())
        self.context += int((of_starts * of_counts).sum())

    def _collect(self) -> None:
        """Wait for the passes that graphs compute, which need not wait for each other on the host."""
        if not self._replayed:
            return
        passes, self._replayed = self._replayed, []
        for (sampling, _), tokens in zip(passes, self._model.wait(*(each for _, each in passes)), strict=True):
            for at, token in zip(sampling, tokens, strict=True):
                self.tokens[at].append(token)

    def _take(self, sampling: list[int], guesses: Guesses) -> None:
        """Add a token to each of these drafts. A draft ends where its row's grammar has no mask: where the model would sample without one, no
        token counts. A token in front of such a place gains nothing either, but one is kept, so that the scheduler learns what drafts are
        worth there."""
        for at, token in zip(sampling, guesses.tokens, strict=True):
            self.tokens[at].append(token)
            self._num_drafted[at] += 1
        for place in guesses.unmasked:
            at = sampling[place]
            del self.tokens[at][max(1, len(self.tokens[at]) - 2) :]
            self._ended.add(at)
        going_on = {self._rows[at]: self.tokens[at][-1] for at in sampling if at not in self._ended}
        self._model.grammars.add_drafts(going_on)


def _fitted(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[S, Vd] → [S, V]: models of one vocabulary may be padded to different sizes."""
    if logits.shape[1] >= vocab_size:
        return logits[:, :vocab_size]
    fitted = logits.new_full((len(logits), vocab_size), -torch.inf)
    fitted[:, : logits.shape[1]] = logits
    return fitted
