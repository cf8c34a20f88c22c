"""DraftLoader: loads a draft model beside the model that it drafts for (decision 048)."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from octavo.config import AUTO, replace
from octavo.errors import ConfigError
from octavo.kernels.cpu.native import Native
from octavo.layers.context import BuildContext
from octavo.messages import most_samples
from octavo.spec import PageLayout
from octavo.weights.formats.checkpoint import Checkpoint
from octavo.weights.sources.source import ModelSource
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.draft_model import DraftModel, FilledPages
from octavo.worker.graphs import Graphs
from octavo.worker.load import Loader
from octavo.worker.memory.measure import memory_errors
from octavo.worker.memory.page_count import in_words as in_words_of
from octavo.worker.outline import outline_of
from octavo.worker.pages import Pages
from octavo.worker.runner import Runner
from octavo.worker.trial_steps import warm_up_draft

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

_DRAFT_TOKENS = 512
_MOST_DIFFERENT = 0.01  # of the tokens: names of control tokens, mostly


class DraftLoader(Loader):
    """Loads a draft model beside the model that it drafts for: with the same kernels, threads and ranks, on pages with the same numbers.
    Settings that name no model are those of the other one."""

    checkpoint: Checkpoint
    context: BuildContext
    what, method = "draft model", "draft_model"
    num_stores = 1  # that have the numbers of the model's pages, and move with them

    def __init__(self, target: Loader, source: ModelSource) -> None:
        limits = target.limits
        # Experts of a draft model, if it has some, are sliced like its other layers.
        config = replace(
            target.config,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            cpu_threads=limits.cpu_threads,
            max_model_len=AUTO,
            hf_overrides="",
            speculative_config="",
            enable_lora=False,
            lora_modules="",
            enable_expert_parallel=False,
        )
        super().__init__(config, source, target.ranks, target._local_rank, target._num_local_ranks)
        self._target = target

    @property
    def page_bytes(self) -> int:
        """What drafting takes of a page."""
        return self.stores.page_bytes

    def open(self) -> Checkpoint:
        with self._about():
            checkpoint = super().open()
            if self.spec.is_encoder:
                raise ConfigError(f"{self.spec.family} is an encoder, which generates nothing: name another model")
            check_vocabulary(
                _tokenizer(self.source, ""),
                self.spec.vocab_size,
                _tokenizer(self._target.source, self.config.model.tokenizer),
                self._target.spec.vocab_size,
            )
        # Beyond its own context it does not draft.
        max_model_len = min(self.spec.context_len, self._target.limits.max_model_len)
        self.limits = dataclasses.replace(self.limits, max_model_len=max_model_len)
        return checkpoint

    def _stored_dtype(self, checkpoint: Checkpoint) -> str:
        """The other model's dtype, whatever this checkpoint has: what holds for one holds for both, such as --deterministic, which a GPU has in
        16 bits only."""
        return self._target.limits.dtype

    def choose(self, checkpoint: Checkpoint) -> BuildContext:
        with self._about():
            context = super().choose(checkpoint)
            if self.group.size > 1:
                self._check_shares(checkpoint, context)
            return context

    def _check_shares(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        """Raises ConfigError where the ranks cannot divide it: before the other model's weights are read."""
        outline_of(checkpoint, self.spec, context)

    def load_beside(self) -> list[str]:
        """Load the weights. → notes for the start report."""
        available = self.device.memory_available()
        with torch.inference_mode(), self._about(), memory_errors(self.limits.dtype, available):
            self.build(self.checkpoint, self.context)
            notes = self.weights.fill(self.checkpoint, available)
        sizes = f"{in_words_of(self.model.weights_bytes)} of weights, {in_words_of(self.page_bytes)} of each KV page"
        return [f"{self.what} {self.source.name}: {each}" for each in (sizes, *notes)]

    def allocate_beside(self, num_pages: int, num_host_pages: int, runner: Runner) -> tuple[DraftModel, list[str]]:
        """Allocate as many pages as the other model has. → the draft model, and notes for the report."""
        limits = self.limits
        # Catching up with a long prompt takes several steps anyway: memory for larger passes would be for little.
        max_tokens = min(limits.max_num_batched_tokens, _DRAFT_TOKENS + most_samples(limits.max_num_seqs))
        pages = Pages(
            self.stores.allocate(num_pages, self._max_batch_rows), self.attention.page_dim, self.device, num_host_pages
        )
        steps, notes = self._tape(max_tokens)
        draft = self._make(steps, pages, runner, num_pages, num_host_pages, max_tokens)
        if draft.graphs is not None:
            warm_up_draft(draft, draft.graphs, runner)
        return draft, [f"{self.what} {self.source.name}: {note}" for note in notes]

    def _make(
        self,
        steps: CpuSteps | None,
        pages: Pages,
        runner: Runner,
        num_pages: int,
        num_host_pages: int,
        max_tokens: int,
    ) -> DraftModel:
        filled = FilledPages(runner.rows, self.limits.max_num_seqs, num_pages, num_host_pages)
        vocab_size = self._target.spec.vocab_size
        graphs = self._make_graphs(runner)
        return DraftModel(
            self.model, steps, self._native, pages, runner.rows, runner.staging, filled, vocab_size, max_tokens, graphs
        )

    def _make_graphs(self, runner: Runner, features: torch.Tensor | None = None) -> Graphs | None:
        """What captures its passes; None: they are not captured. `features`: of a head, by slot."""
        if runner.graphs is None or not self.attention.can_capture:
            return None
        vocab_size = self._target.spec.vocab_size
        return Graphs(
            self.device, runner.rows, self.model, self._max_batch_rows, vocab_size=vocab_size, features=features
        )

    @property
    def _max_batch_rows(self) -> int:
        return most_samples(self.limits.max_num_seqs) if self.device.is_cuda else self.limits.max_num_seqs

    @contextlib.contextmanager
    def _about(self) -> Iterator[None]:
        """Name the draft model in a ConfigError raised inside."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.what} {self.source.name}: {error.message}") from error

    def _find_native(self) -> tuple[Native | None, str]:
        return self._target._native, ""

    def _page_layout(self) -> PageLayout:
        """One page table for all layers, that of the other model: layers with a window see less of it."""
        num_layers = self.spec.num_layers
        return PageLayout((0,), (0,) * num_layers, tuple(range(num_layers)), num_layers)


def _tokenizer(source: ModelSource, tokenizer: str) -> "Vocabulary | None":
    """None: it has none that can be read."""
    from octavo.text import load_text

    try:
        return load_text(source.path, tokenizer=tokenizer).vocabulary
    except ConfigError:
        return None


def check_vocabulary(
    draft: "Vocabulary | None", draft_size: int, target: "Vocabulary | None", target_size: int
) -> None:
    """Raises ConfigError if two models do not have the same tokens. Sizes are of their logits, which may be padded."""
    problem = ""
    if draft is None or target is None:
        if draft_size != target_size:
            problem = f"its vocabulary has {draft_size:,} tokens and the model's has {target_size:,}"
    else:
        size = min(draft.size, target.size)
        num_different = sum(draft.spell(i) != target.spell(i) for i in range(size))
        num_different += max(draft.size, target.size) - size
        if num_different > _MOST_DIFFERENT * target.size:
            problem = (
                f"its {draft.size:,} tokens and the {target.size:,} of the model differ in {num_different:,} places"
            )
    if problem:
        raise ConfigError(
            f"{problem}: a draft model must have the vocabulary of the model that it drafts for; use another, or ngram or suffix"
        )
