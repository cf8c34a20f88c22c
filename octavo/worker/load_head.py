"""HeadLoader: loads a draft head beside the model that it drafts for (decision 064)."""

import dataclasses

import torch

from octavo.config import replace
from octavo.errors import ConfigError
from octavo.kernels.device_ops import DeviceOps
from octavo.layers.context import BuildContext
from octavo.layers.model import CausalModel
from octavo.messages.speculation import SpeculationSettings
from octavo.models.draft_heads import eagle3, mtp
from octavo.models.draft_heads.base import DraftHead
from octavo.weights.formats.checkpoint import Checkpoint, naming, open_checkpoint
from octavo.weights.sources.source import resolve as resolve_source
from octavo.worker.cpu_steps import CpuSteps
from octavo.worker.draft_head import FeaturePages, HeadDrafter
from octavo.worker.load import Loader
from octavo.worker.load_draft import DraftLoader
from octavo.worker.pages import Pages
from octavo.worker.runner import Runner
from octavo.worker.weights import RankWeights


def head_loader(target: Loader, checkpoint: Checkpoint, settings: SpeculationSettings) -> "HeadLoader":
    """`checkpoint`: of the model that it drafts for."""
    if settings.method == "mtp":
        return MTPLoader(target, checkpoint)
    is_dummy = target.config.model.load_format == "dummy"
    return Eagle3Loader(target, resolve_source(settings.model, allow_missing_weights=is_dummy, is_draft_head=True))


class HeadLoader(DraftLoader):
    model: DraftHead
    num_stores = 2  # the other one has features

    def _take_limits(self) -> None:
        """The model's, in its arithmetic. Beyond its own context the head does not draft."""
        limits = self._target.limits
        self.limits = dataclasses.replace(limits, max_model_len=min(self.spec.context_len, limits.max_model_len))

    @property
    def page_bytes(self) -> int:
        return super().page_bytes + self.config.cache.page_size * self.spec.hidden_size * self._feature_dtype.itemsize

    @property
    def _feature_dtype(self) -> torch.dtype:
        return self.context.dtype

    def build(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        target = self._target.model
        assert isinstance(target, CausalModel)
        with self._about():
            self.model = self._make_head(checkpoint, context, target)
        target.tap = self.model.make_tap()
        self.weights = RankWeights(
            self.model,
            self.config.model,
            self.weight_dtype,
            self.device,
            self.group.size,
            context.methods,
            self._elsewhere(checkpoint),
        )

    def choose(self, checkpoint: Checkpoint) -> BuildContext:
        context = super().choose(checkpoint)
        if self.attention.name == "flashinfer":
            with self._about():
                raise ConfigError(
                    "attention by flashinfer cannot leave out the first key, which a head does not have: leave --attention-backend "
                    "out, or use triton"
                )
        return context

    def _check_shares(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        """The layers of an MTP head are like the model's."""

    def _make_head(self, checkpoint: Checkpoint, context: BuildContext, target: CausalModel) -> DraftHead:
        raise NotImplementedError

    def _elsewhere(self, checkpoint: Checkpoint) -> frozenset[str]:
        """Tensors of the checkpoint that are not the head's."""
        return frozenset()

    def _make(
        self,
        steps: CpuSteps | None,
        pages: Pages,
        runner: Runner,
        num_pages: int,
        num_host_pages: int,
        max_tokens: int,
    ) -> HeadDrafter:
        zeros = self.device.zeros if self._native is None else self._native.zeros
        store = zeros((num_pages, self.config.cache.page_size, self.spec.hidden_size), self._feature_dtype)
        feature_pages = Pages([store], 0, self.device, num_host_pages)
        filled = FeaturePages(runner.rows, self.limits.max_num_seqs, num_pages, num_host_pages)
        vocab_size = self._target.spec.vocab_size
        features = store.view(-1, store.shape[-1])
        if runner.graphs is not None:
            runner.graphs.keep_features(features)
        return HeadDrafter(
            self.model,
            steps,
            self._native,
            pages,
            feature_pages,
            runner.rows,
            runner.staging,
            filled,
            vocab_size,
            max_tokens,
            self._make_graphs(runner, features),
        )


class Eagle3Loader(HeadLoader):
    what, method = "EAGLE-3 head", "eagle3"

    def open(self) -> Checkpoint:
        with self._about():
            if self.source.kind == "gguf":
                raise ConfigError("it must be a folder with config.json and safetensors, not a GGUF file")
            is_dummy = self.config.model.load_format == "dummy"
            checkpoint = open_checkpoint(self.source, allow_missing_weights=is_dummy)
            with naming(checkpoint.config_path):
                checkpoint = dataclasses.replace(checkpoint, config=eagle3.flat(checkpoint.config))
                self.spec = eagle3.spec(checkpoint.config, self._target.spec)
        self._take_limits()
        return checkpoint

    def _packed_types(self, checkpoint: Checkpoint, ops: DeviceOps) -> frozenset[str]:
        return frozenset()  # matrices are split, which packed ones cannot be

    def _check_shares(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        eagle3.check_ranks(self.spec, context.group)

    def _make_head(self, checkpoint: Checkpoint, context: BuildContext, target: CausalModel) -> DraftHead:
        has_embedding = False
        if checkpoint.weights is not None:
            names = [name for name, _ in checkpoint.tensors(torch.device("meta"), self.weight_dtype)]
            has_embedding = any(name.removeprefix("model.") == "embed_tokens.weight" for name in names)
        return eagle3.Model(checkpoint.config, self.spec, context, target, has_embedding)


class MTPLoader(HeadLoader):
    what, method = "MTP head of", "mtp"

    def __init__(self, target: Loader, checkpoint: Checkpoint) -> None:
        super().__init__(target, target.source)
        # Its layer has experts as the model's layers have them.
        self.config = replace(self.config, enable_expert_parallel=target.config.parallel.enable_expert_parallel)
        self._opened = checkpoint

    def open(self) -> Checkpoint:
        with naming(self._opened.config_path):
            self.spec = mtp.spec(self._opened.config, self._target.spec)
        self._take_limits()
        return self._opened

    def _make_head(self, checkpoint: Checkpoint, context: BuildContext, target: CausalModel) -> DraftHead:
        return mtp.Model(checkpoint.config, self.spec, context, target)

    def _elsewhere(self, checkpoint: Checkpoint) -> frozenset[str]:
        if checkpoint.weights is None:
            return frozenset()
        own = mtp.prefix(self._target.spec)
        names = (name for name, _ in checkpoint.tensors(torch.device("meta"), self.weight_dtype))
        return frozenset(name for name in names if not name.startswith(own))
