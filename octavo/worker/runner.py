"""Runner: one rank's steps, from StepPlan to Batch, hidden states, logits and tokens. load.py makes the runner."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.batch import Batch
from octavo.device import Device
from octavo.kernels.cpu.native import Native
from octavo.layers.model import DecoderModel
from octavo.messages import NO_INPUT, DraftWork, StepPlan, most_samples
from octavo.parallel import NO_LINKS, Links
from octavo.sampling.state import Ints
from octavo.worker.adapters import RankAdapters
from octavo.worker.assemble import Assembled, Columns, adapters_of, assemble, shared_in
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.draft_model import DraftModel
from octavo.worker.drafts import Drafted
from octavo.worker.graphs import Graphs, is_only_greedy
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
        self._offloaded: OffloadedMemory | None = None  # None: awake
        self._host_chunks = HostChunks(device)  # of weights while it sleeps

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
                self._offloaded.drop(self.pages.layers if draft is None else self.pages.layers + draft.pages.layers)
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
            columns = Columns.of(plan)
            self.rows.sampling.grammars.drafts = {}
            is_pooling = not self.rows.pooling.keys().isdisjoint(plan.rows)
            if self.graphs is not None and not plan.enters and not is_pooling:
                if columns.is_steady:
                    changes = self.rows.note_pages(plan)
                    if self.graphs.can_run(len(columns.rows), changes):
                        if self.draft is not None:
                            self.draft.filled.written(plan)
                        return self._repeat(plan.step, self.graphs, columns.rows, columns.lens, changes)
                elif self.draft is None and columns.is_verifying:
                    changes = self.rows.note_pages(plan)
                    if self.graphs.can_run(int(columns.counts.sum()), changes):
                        return self._verify(plan, self.graphs, columns, changes)
            self.rows.update(plan)
            work: DraftWork | None = None
            if self.draft is not None:
                plan, work = self.draft.propose(plan)
                columns = Columns.of(plan)
            if not plan.rows:
                return LaunchedStep(plan.step, None, None)
            if (
                self.graphs is not None
                and not is_pooling
                and columns.is_verifying
                and self.graphs.can_run(int(columns.counts.sum()), NO_CHANGES)
            ):
                step = self._verify(plan, self.graphs, columns, NO_CHANGES)
            else:
                self.rows.write_drafts(plan)
                self._note_drafts(plan)
                step = self._send_home(plan.step, *self.compute(columns))
                step.drafted = Drafted.of(plan, self.rows.pooling)
            step.draft_work = work
            return step

    def _note_drafts(self, plan: StepPlan) -> None:
        """Tell grammars which tokens the step verifies."""
        drafts = {plan.rows[draft.at]: draft.tokens for draft in plan.drafts if draft.tokens}
        self.rows.sampling.grammars.drafts = drafts

    def _verify(self, plan: StepPlan, graphs: Graphs, columns: Columns, changes: PageChanges) -> LaunchedStep:
        """Replay a graph for a step in which every row adds one token, and some verify drafts. A drafted token is computed like a row of its
        own that shares its row's pages: keys and values of all tokens are written before any is read. So a step of some tokens has the graph
        of a step of as many rows."""
        self._note_drafts(plan)
        rows, lens = columns.by_token()
        drafted: Ints = np.full(len(rows), NO_INPUT, dtype=np.int64)
        ends = np.cumsum(columns.counts)
        for draft in plan.drafts:
            end = ends[draft.at]
            drafted[end - len(draft.tokens) : end] = draft.tokens
        step = self._repeat(plan.step, graphs, rows, lens, changes, drafted)
        step.drafted = Drafted.of(plan, self.rows.pooling)
        return step

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

    def _repeat(
        self,
        number: int,
        graphs: Graphs,
        rows: Ints,
        lens: Ints,
        changes: PageChanges,
        drafted: Ints | None = None,
    ) -> LaunchedStep:
        """Replay a graph for a step in which every row adds one token. A row that verifies a draft is there once for each of its
        tokens (`drafted`, as Graphs.run)."""
        stage = self.model.stage
        shared = shared_in(self.rows, rows, lens)
        if not stage.is_first:
            self.links.receive(graphs.input(len(rows)))
        is_greedy = not stage.is_last or is_only_greedy(self.rows.sampling, rows, lens)
        logits = graphs.run(rows, lens, changes, shared, is_greedy, self._adapters_of(rows), drafted)
        if not stage.is_last:
            self.links.send(graphs.output(len(rows)).clone())
            done = self.device.event()
            done.record()
            return LaunchedStep(number, None, done)
        extras: Extras | None = None
        if logits is not None:
            tokens, extras = sample_scored(logits, self.rows, rows, lens)
            graphs.store(tokens)
            extras = None if extras is None else extras.sent_home()
        done = self.device.event()
        done.record()
        return LaunchedStep(number, graphs.host_tokens(len(rows)), done, extras)

    def _adapters_of(self, rows: Ints) -> "HostBlocks | None":
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
        done = self.device.event()
        done.record()
        return LaunchedStep(number, home, done, extras)
