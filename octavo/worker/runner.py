"""Runner: one rank's steps, from StepPlan to Batch, hidden states, logits and tokens. load.py makes the runner."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.batch import Batch
from octavo.device import Device, Event
from octavo.kernels.cpu.native import Native
from octavo.layers.model import DecoderModel
from octavo.messages import DraftWork, StepPlan, most_samples
from octavo.parallel import NO_LINKS, Links
from octavo.worker.adapters import RankAdapters
from octavo.worker.assemble import Assembled, Columns, TokenRows, adapters_of, assemble, shared_in
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.draft_model import DraftModel
from octavo.worker.drafts import Drafted, fill_forced
from octavo.worker.graphs import Graphs
from octavo.worker.pages import Pages
from octavo.worker.pooling import take_pooled
from octavo.worker.rows import NO_CHANGES, PageChanges, RowState
from octavo.worker.scoring import sample_scored, score_prompts, wants_prompt_scores
from octavo.worker.sleep import HostChunks, OffloadedMemory, tensors_of
from octavo.worker.staging import Staging
from octavo.worker.step import Extras, LaunchedStep

if TYPE_CHECKING:
    from octavo.worker.gpu_adapters import HostBlocks


class Runner:
    """Runs steps: call launch() once per step, after `pages` is set. `steps`: a CPU's steps, each recorded as one native call;
    None: they run operation by operation. `links`: to the stages before and after; until they are set, steps are trials. Only the last stage
    samples."""

    pages: Pages

    def __init__(
        self,
        device: Device,
        model: DecoderModel,
        rows: RowState,
        staging: Staging,
        max_rows: int,
        native: Native | None,
        graphs: Graphs | None,
    ) -> None:
        self.device, self.model, self.rows, self.staging = device, model, rows, staging
        self.graphs = graphs
        self.steps: CpuSteps | None = None
        self.adapters: RankAdapters | None = None  # None: no request has one (--enable-lora)
        self.draft: DraftModel | None = None  # None: drafts, if there are any, come with the plan
        self.links: Links = NO_LINKS
        self._native = native
        # As many steps as there are stages, and one more, may be uncollected.
        num_samples = most_samples(max_rows)
        self._host_tokens = [device.pinned((num_samples,), torch.int64) for _ in range(model.stage.count + 2)]
        self._marks = [device.event() for _ in self._host_tokens]  # of the same steps
        self._offloaded: OffloadedMemory | None = None  # None: awake
        self._host_chunks = HostChunks(device)  # of weights while it sleeps

    def give_back(self, pages: list[int]) -> None:
        """Give the memory of these pages back to the system."""
        self.pages.give_back(pages)
        if self.draft is not None:
            self.draft.give_back(pages)

    def sleep(self, keeps_pages: bool, moved: Callable[[], None]) -> None:
        """Free a GPU's memory until wake_up(). All steps are done. `keeps_pages`: KV pages hold what is needed. `moved`: called now and
        then while weights are copied."""
        if not self.device.is_cuda or self._offloaded is not None:
            return
        if self.graphs is not None:
            self.graphs.forget()
        draft = self.draft
        if draft is not None and draft.graphs is not None:
            draft.graphs.forget()
        with torch.inference_mode():
            self._offloaded = OffloadedMemory(self.device, self._host_chunks)
            models = [self.model] if draft is None else [self.model, draft.model]
            self._offloaded.keep((tensor for model in models for tensor in tensors_of(model)), moved)
            if not keeps_pages:
                self._offloaded.drop(self.pages.layers if draft is None else self.pages.layers + draft.stores)
        self.device.memory_use()  # the allocator frees what it would keep for later tensors

    def wake_up(self, moved: Callable[[], None]) -> None:
        if self._offloaded is not None:
            with torch.inference_mode():
                self._offloaded.bring_back(moved)
            self._offloaded = None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one step. Sampled tokens stay in the token table, where the next step reads its inputs."""
        step = self._launch(plan)
        self.rows.sampling.grammars.started(step)
        return step

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with torch.inference_mode():
            self.pages.move(plan.moves)
            if self.draft is not None:
                self.draft.move(plan.moves)
            self.rows.leave(plan.leaves)
            self.rows.force(plan.forced)
            if plan.inputs and self.model.stage.is_first:
                self.rows.take_inputs(plan)
            self.rows.sampling.grammars.drafts = {}
            # Drafts that a draft model or a grammar has yet to fill in need to know of rows that enter.
            has_gaps = any(draft.tokens[0] < 0 for draft in plan.drafts)
            may_repeat = not plan.enters and not has_gaps and (self.draft is None or not plan.drafts)
            if may_repeat and (tokens := self._captured(plan, len(plan.page_rows))) is not None:
                changes = self.rows.note_pages(plan)
                if self.draft is not None:
                    self.draft.filled.written(plan)
                return self._repeat(plan, tokens, changes)
            self.rows.update(plan)
            work: DraftWork | None = None
            if has_gaps:
                plan = fill_forced(plan, self.rows.sampling.grammars)
            if self.draft is not None:
                plan, work = self.draft.propose(plan)
            if not plan.rows:
                return LaunchedStep(plan.step, None, None)
            if plan.drafts and (tokens := self._captured(plan)) is not None:
                step = self._repeat(plan, tokens, NO_CHANGES)
            else:
                self.rows.write_drafts(plan)
                self._note_drafts(plan)
                step = self._send_home(plan.step, *self.compute(Columns.of(plan)))
                step.drafted = Drafted.of(plan, self.rows.pooling)
            step.has_filled_drafts, step.draft_work = has_gaps, work
            return step

    def _captured(self, plan: StepPlan, num_changes: int = 0) -> TokenRows | None:
        """The tokens of a step that a graph can compute; None: it is another step. `num_changes`: of page tables, that the graph has to
        make."""
        if self.graphs is None or not self.rows.pooling.keys().isdisjoint(plan.rows):
            return None
        tokens = TokenRows.of(plan)
        return tokens if tokens is not None and self.graphs.can_run(len(tokens.rows), num_changes) else None

    def _note_drafts(self, plan: StepPlan) -> None:
        """Tell grammars which tokens the step verifies."""
        drafts = {plan.rows[draft.at]: draft.tokens for draft in plan.drafts if draft.tokens}
        self.rows.sampling.grammars.drafts = drafts

    def compute(self, columns: Columns) -> tuple[torch.Tensor | None, Extras | None]:
        """Run a step of any shape, kernel by kernel → sampled tokens [S], and what else its rows want. A stage that is not the last sends
        its hidden states on."""
        assembled = assemble(columns, self.rows, self.staging)
        if assembled.batch.adapter_of is None or self.adapters is None:
            return self._compute(columns, assembled)
        with self.adapters.of(assembled.batch, self.staging):
            return self._compute(columns, assembled)

    def _compute(self, columns: Columns, assembled: Assembled) -> tuple[torch.Tensor | None, Extras | None]:
        if not self.model.stage.is_last:
            self._pass_on(assembled.batch)
            return None, None
        extras: Extras | None = None
        if self.rows.pooling.keys().isdisjoint(assembled.sample_rows.tolist()) and not wants_prompt_scores(
            self.rows.sampling, columns
        ):
            if not self.device.is_cuda:  # on a GPU the last tokens may still be computed, and its pass overlaps anyway
                self.rows.sampling.grammars.begin(assembled.sample_rows, assembled.sample_lens)
            logits = self._logits(assembled.batch)
            self._show_draft(assembled.batch, self.steps)
        else:
            hidden = self.model.forward(assembled.batch, self._received(assembled.batch))
            self._show_draft(assembled.batch, None)
            prompt_scores = score_prompts(self.model, hidden, self.rows, columns, assembled.last)
            counts = columns.per_sample(columns.counts)
            vectors, assembled = take_pooled(self.model, hidden, assembled, counts, self.rows.pooling)
            extras = Extras(vectors, None, prompt_scores)
            at = assembled.batch.sample_at
            logits = self.model.logits(hidden.index_select(0, at)) if len(at) else None
        if logits is None:
            return None, extras
        rows, lens = assembled.sample_rows, assembled.sample_lens
        tokens, extras = sample_scored(logits, self.rows, rows, lens, self._native, extras)
        self.rows.tokens.view(-1).index_copy_(0, assembled.sample_cells, tokens.to(torch.int32))
        return tokens, extras

    def _logits(self, batch: Batch) -> torch.Tensor | None:
        """[S, V]; None: nothing is sampled."""
        if self.steps is not None:
            if not self.model.stage.is_first:
                self.links.receive(self.steps.input(batch.num_tokens))
            logits = self.steps.run(batch)
            return logits if len(logits) else None
        hidden = self.model.forward(batch, self._received(batch))
        if not len(batch.sample_at):
            return None
        return self.model.logits(hidden.index_select(0, batch.sample_at))

    def _show_draft(self, batch: Batch, steps: CpuSteps | None) -> None:
        """Give a draft head what was made of this batch's hidden states. `steps`: what has computed it; None: the model itself."""
        if self.draft is None or self.model.tap is None:
            return
        self.draft.read(batch, self.model.tap.features if steps is None else steps.features(batch.num_tokens))

    def _received(self, batch: Batch) -> torch.Tensor | None:
        """The hidden states [T, D] of the stage before; None: this is the first."""
        model = self.model
        if model.stage.is_first:
            return None
        shape = (batch.num_tokens, model.hidden_size)
        return self.links.receive(torch.empty(shape, dtype=model.dtype, device=self.device.torch_device))

    def _pass_on(self, batch: Batch) -> None:
        """Run this stage's layers and send what they make to the next stage."""
        if self.steps is None:
            self.links.send(self.model.forward(batch, self._received(batch)))
            return
        if not self.model.stage.is_first:
            self.links.receive(self.steps.input(batch.num_tokens))
        self.links.send(self.steps.run(batch).clone())

    def _repeat(self, plan: StepPlan, tokens: TokenRows, changes: PageChanges) -> LaunchedStep:
        """Replay a graph for a step in which every row adds one token, and some may verify drafts. A drafted token is computed like a row of
        its own that shares its row's pages: keys and values of all tokens are written before any is read. So a step of some tokens has the
        graph of a step of as many rows."""
        graphs, stage, (rows, lens, drafted) = self.graphs, self.model.stage, tokens
        assert graphs is not None
        if plan.drafts:
            self._note_drafts(plan)
        shared = shared_in(self.rows, rows, lens)
        if not stage.is_first:
            self.links.receive(graphs.input(len(rows)))
        is_greedy = not stage.is_last or self.rows.sampling.is_only_greedy(rows, lens)
        logits = graphs.run(rows, lens, changes, shared, is_greedy, self._adapters_of(rows), drafted)
        if not stage.is_last:
            self.links.send(graphs.output(len(rows)).clone())
            return LaunchedStep(plan.step, None, self._mark(plan.step))
        extras: Extras | None = None
        if logits is not None:
            sampled, extras = sample_scored(logits, self.rows, np.array(rows), np.array(lens))
            graphs.store(sampled)
            extras = None if extras is None else extras.sent_home()
        step = LaunchedStep(plan.step, graphs.host_tokens(len(rows)), self._mark(plan.step), extras)
        step.drafted = Drafted.of(plan, self.rows.pooling)
        return step

    def _mark(self, number: int) -> Event:
        """Mark the end of what is queued. A mark is used again by a later step: as many steps can be uncollected as there are marks."""
        done = self._marks[number % len(self._marks)]
        done.record()
        return done

    def _adapters_of(self, rows: list[int]) -> "HostBlocks | None":
        """The adapters of a captured step's rows; None: no row has one."""
        names, of_rows = adapters_of(rows, self.rows)
        if of_rows is None:
            return None
        assert self.adapters is not None
        return self.adapters.plan(names, of_rows)

    def _send_home(self, number: int, tokens: torch.Tensor | None, extras: Extras | None) -> LaunchedStep:
        if not self.device.is_cuda or (tokens is None and extras is None):
            return LaunchedStep(number, tokens, None, extras)
        extras = None if extras is None else extras.sent_home()
        home = None
        if tokens is not None:
            home = self._host_tokens[number % len(self._host_tokens)][: len(tokens)]
            home.copy_(tokens, non_blocking=True)
        return LaunchedStep(number, home, self._mark(number), extras)
