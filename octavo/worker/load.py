"""Loader: one rank before its first step. Reads the configuration, chooses kernels and types, builds the model, loads its
weights, measures the memory that steps take, allocates the pages, and returns a Runner."""

import dataclasses
import functools
import importlib
import importlib.util
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.choose import choose
from octavo.attention.native_cpu import NativeCpuAttention
from octavo.config import AUTO, Config, ParallelConfig, or_else
from octavo.device import Device, pick
from octavo.errors import ConfigError, quote
from octavo.ipc.cores import usable_cores
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.cpu.native import Native
from octavo.kernels.device_ops import DeviceOps
from octavo.kernels.torch_ops import torch_ops
from octavo.kernels.triton.runtime.batch_sizes import ladder
from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts
from octavo.layers.model import DecoderModel
from octavo.limits import Limits, hold_whole_prompts, resolve
from octavo.messages import DeviceMemory, LoadReport, TrialSeconds, most_samples
from octavo.messages.speculation import FLAG, SpeculationSettings, is_auto, named_ranks, names_method, speculation_of
from octavo.models import load_family
from octavo.models.draft_heads.kinds import has_prediction_layers, kind_of
from octavo.parallel import Ranks, single_rank
from octavo.quants.exact import kept_on_cpu
from octavo.sampling.grammar.masks import Grammars
from octavo.sampling.grammar.row_processes import GrammarLimits
from octavo.spec import ModelSpec, PageLayout
from octavo.stage import WHOLE, Stage, check_stages, in_words, read_split, stage_of
from octavo.weights.formats.checkpoint import Checkpoint, TensorSource, naming, open_checkpoint
from octavo.weights.formats.dummy import dummy_packed_types
from octavo.weights.methods.base import Settings
from octavo.weights.methods.registry import MOST_DECODED, Methods, kept_on_gpu, packed_on_gpu
from octavo.weights.methods.torch_fp8 import check_fp8
from octavo.weights.sources.folder import read_config
from octavo.weights.sources.source import ModelSource
from octavo.weights.sources.source import resolve as resolve_source
from octavo.worker import page_transfer
from octavo.worker.adapters import AdapterHolder, RankAdapters
from octavo.worker.cpu_steps import CpuSteps, find_native, held, kinds_of, record
from octavo.worker.determinism import about_determinism
from octavo.worker.fingerprint import fingerprint_of
from octavo.worker.graphs import Graphs
from octavo.worker.kv_buffers import KVBuffers, name_of, page_dtype
from octavo.worker.memory.measure import measure, memory_errors
from octavo.worker.native_adapters import NativeHolder
from octavo.worker.outline import Outline, outline_of, whole_outline
from octavo.worker.pages import STAGING_BYTES, Pages
from octavo.worker.rows import RowState
from octavo.worker.runner import Runner
from octavo.worker.staging import Staging
from octavo.worker.trial_steps import TrialSteps, most_tokens
from octavo.worker.weights import RankWeights

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary
    from octavo.weights.methods.triton_adapters import AdapterSites
    from octavo.worker.load_draft import DraftLoader

_MAX_STAGES = 14  # with more, the ring of inputs of CUDA graphs is too short
_START_S = 2.0  # delay before the vocabulary for grammars is read, so that it does not slow down the start
_MOST_ADAPTER_COPIES = 8 * 2**30  # bytes of host memory: pinning more would take long at the start


class Loader:
    """Call load(), then allocate(), which returns the rank's Runner. The stages of load() are public for DryRun."""

    spec: ModelSpec
    limits: Limits
    model: DecoderModel
    weights: RankWeights
    layout: PageLayout
    attention: AttentionBackend
    stores: KVBuffers
    weight_dtype: torch.dtype
    kv_dtype: torch.dtype
    stage: Stage = WHOLE
    adapters: RankAdapters | None = None  # None: without --enable-lora
    _adapter_bytes = 0  # memory for them on this rank
    _sites: "AdapterSites | None" = None  # products that they may change, on a GPU
    draft: "DraftLoader | None" = None  # of the draft model; None: there is none

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        ranks: Ranks | None = None,
        local_rank: int = 0,
        num_local_ranks: int = 0,
    ) -> None:
        """`local_rank`, `num_local_ranks`: this rank's number among those on its machine, and how many they are; 0: there is no other
        yet, but a server would have all of them here."""
        self.config = config
        self.source = source
        self.ranks = ranks or single_rank()
        self.group = self.ranks.group
        self._local_rank, self._num_local_ranks = local_rank, max(1, num_local_ranks)
        self._num_planned_ranks = num_local_ranks or config.parallel.num_ranks
        self.device: Device = pick(config.model.device, local_rank)
        self._outline: Outline | None = None  # of the whole model, where this rank has a part of its layers
        self._native: Native | None = None
        self._runner: Runner | None = None  # on a GPU it is made before the pages, to measure with
        self._notes: list[str] = []

    def load(self) -> LoadReport:
        """Load the weights. → a report with the memory left for pages, measured once every rank has loaded its share."""
        checkpoint = self.open()
        context = self.choose(checkpoint)
        available = self.device.memory_available()
        with torch.inference_mode(), memory_errors(self.limits.dtype, available):
            self.build(checkpoint, context)
            self._notes += self.weights.fill(checkpoint, available)
        if self.draft is not None:
            self._notes += self.draft.load_beside()
        if context.methods.settings.adapts:
            self._open_adapters(checkpoint, context)
        self._notes.append(held(self.model) if self._native is not None else context.methods.in_words())
        self.ranks.world.barrier()  # ranks on one machine share its memory: measure when all have loaded
        report = self.report(context.dtype, self._measure(context.ops) if self.device.is_cuda else None)
        if self.group.rank:  # one rank of each stage tells
            return report
        parts = fingerprint_of(
            context, self.config.model, self.source, self.spec, self.model, report.kv_dtype, self.device.chip
        )
        return msgspec.structs.replace(report, fingerprint=parts)

    def _open_adapters(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        """Find the products that adapters may change, and make room for adapters: on a GPU before its memory is measured."""
        lora, num_ranks = self.config.lora, self.config.parallel.num_ranks
        available = self._host_available() if self._sites is None else self.device.memory_available()
        self._adapter_bytes = or_else(lora.lora_memory_bytes, num_ranks * (available // 10)) // num_ranks
        if self._adapter_bytes > available // 2:
            raise ConfigError(
                f"--lora-memory {num_ranks * self._adapter_bytes} is more than half of the {num_ranks * available} bytes that are left "
                "for adapters and KV pages"
            )
        holder = self._native_holder() if self._sites is None else self._gpu_holder(self._sites)
        family = load_family(checkpoint.config["model_type"])
        outline = outline_of(checkpoint, self.spec, context)
        whole = whole_outline(checkpoint, self.spec, context) if self.ranks.num_stages > 1 else None
        self.adapters = RankAdapters(self.model, outline, family, checkpoint.config, holder, whole)
        if self._sites is not None:
            num_parts = self.adapters.num_parts(len(self._sites.weights))
            # A captured step may have more rows than a step has tokens.
            most = max(most_tokens(self.limits), *ladder(self._max_batch_rows))
            self._sites.open(num_parts, most, lora.max_lora_rank)

    def _native_holder(self) -> AdapterHolder[Any]:
        assert self._native is not None
        # Where products round their activations to 8 bits, float32 would only be more to read. Stages may hold their weights in several
        # kinds, and adapters in one.
        (is_rounded,) = self.ranks.world.highest([any(kind.is_quantised for kind in kinds_of(self.model))])
        is_half = is_rounded or self.weight_dtype == torch.bfloat16
        return NativeHolder(self._native, torch.bfloat16 if is_half else torch.float32)

    def _gpu_holder(self, sites: "AdapterSites") -> AdapterHolder[Any]:
        gpu = importlib.import_module("octavo.worker.gpu_adapters")  # by name: Triton may not be installed
        with memory_errors(self.limits.dtype, self.device.memory_available()):
            holder: AdapterHolder[Any] = gpu.GpuHolder(
                sites, self._adapter_bytes, self.device, self._adapter_copy_bytes()
            )
            return holder

    def _adapter_copy_bytes(self) -> int:
        """Pinned host memory for copies of adapters: twice as much as they have on the GPU, and at most an eighth of what is free. A power
        of two: torch rounds up to one."""
        most = min(2 * self._adapter_bytes, self._host_available() // 8, _MOST_ADAPTER_COPIES)
        return 1 << most.bit_length() - 1 if most > 0 else 0

    def _host_available(self) -> int:
        """Bytes of host memory for this rank."""
        fleet = self.config.fleet  # replicas of a machine share its memory
        num_replicas = max(fleet.first_replicas, fleet.max_replicas)
        available = pick("cpu").memory_available() // (self._num_local_ranks * num_replicas)
        return int(available * self.config.cache.memory_share)

    def open(self) -> Checkpoint:
        """Open the checkpoint, and set spec and limits from its configuration."""
        is_dummy = self.config.model.load_format == "dummy"
        checkpoint = open_checkpoint(
            self.source, allow_missing_weights=is_dummy, hf_overrides=self.config.model.hf_overrides
        )
        family = load_family(checkpoint.config["model_type"])
        with naming(checkpoint.config_path):
            self.spec = family.spec(checkpoint.config)
        self.limits = resolve(
            self.config,
            device=self.device.kind,
            stored_dtype=self._stored_dtype(checkpoint),
            context_len=self.spec.context_len,
            num_cores=usable_cores(),
            longest_len=self.spec.longest_len,
            num_local_ranks=self._num_planned_ranks,
        )
        check_parallel(self.spec, self.config.parallel)
        if self.spec.is_encoder:
            self.limits = hold_whole_prompts(self.limits, self.config)
        self._open_draft(checkpoint)
        return checkpoint

    def _stored_dtype(self, checkpoint: Checkpoint) -> str:
        """What --dtype auto takes for the checkpoint's."""
        return checkpoint.stored_dtype

    def _open_draft(self, checkpoint: Checkpoint) -> None:
        """Open the draft model or head, if there is one. Raises ConfigError where it cannot draft for this model."""
        settings = speculation_of(self.config.scheduler.speculative_config, is_gpu=self.device.is_cuda)
        if settings is None:
            return
        num_stages, text = self.config.parallel.pipeline_parallel_size, self.config.scheduler.speculative_config
        if num_stages > 1 and not is_auto(text):
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages}: {settings.method} cannot draft for a model that is divided into stages: use "
                "--tensor-parallel-size, or leave --speculative-config out"
            )
        if not settings.is_by_model:
            return
        is_dummy = self.config.model.load_format == "dummy"
        if settings.method == "draft_model":
            settings = self._by_checkpoint(settings, checkpoint, is_dummy)
        what = "a draft model" if settings.method == "draft_model" else "a draft head"
        self._check_draft_ranks(what)
        if self.spec.is_encoder:
            raise ConfigError(f"{what} is for models that generate; {self.spec.family} is an encoder")
        if any(self.spec.page_layout(self.limits.max_model_len).windows):
            raise ConfigError(
                f"{what} cannot draft for {self.spec.family}, whose layers keep only the KV pages of a window: use ngram or suffix"
            )
        if settings.method == "draft_model":
            from octavo.worker.load_draft import DraftLoader  # imported here: it builds on this module

            self.draft = DraftLoader(self, resolve_source(settings.model, allow_missing_weights=is_dummy))
        else:
            from octavo.worker.load_head import head_loader  # as load_draft

            self.draft = head_loader(self, checkpoint, settings)
        self.draft.checkpoint = self.draft.open()

    def _check_draft_ranks(self, what: str) -> None:
        """Refuse ways to divide the model in which it cannot be drafted for."""
        parallel, num_named = self.config.parallel, named_ranks(self.config.scheduler.speculative_config)
        num_ranks = parallel.tensor_parallel_size
        if num_ranks > 1 and self.device.is_cuda:
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks}: {what} works with one GPU, or with the ranks of a CPU: use ngram or suffix"
            )
        if num_named is not None and num_named != num_ranks:
            raise ConfigError(
                f"{FLAG}: {what} is divided over the ranks of the model, and draft_tensor_parallel_size {num_named} is not "
                f"--tensor-parallel-size {num_ranks}: leave it out"
            )

    def _by_checkpoint(
        self, settings: SpeculationSettings, checkpoint: Checkpoint, is_dummy: bool
    ) -> SpeculationSettings:
        """What the checkpoint that was named is to draft by. A method that a person named is not replaced by another: it is refused where it
        cannot be. `checkpoint`: of the model that is drafted for."""
        source = resolve_source(settings.model, allow_missing_weights=is_dummy, is_draft_head=True)
        kind = kind_of(read_config(source.path)) if source.kind == "folder" else ""
        is_named = names_method(self.config.scheduler.speculative_config)
        about = f"{FLAG}: {source.name} is"
        match kind:
            case "" if is_named or source.path != self.source.path or not has_prediction_layers(checkpoint.config):
                return settings
            case "":
                return msgspec.structs.replace(settings, method="mtp", model="")
            case "eagle3" if not is_named:
                return msgspec.structs.replace(settings, method="eagle3")
            case "eagle3":
                raise ConfigError(f"{about} an EAGLE-3 head, not a draft model: use the method eagle3")
            case "mtp":
                raise ConfigError(
                    f"{about} a checkpoint of layers for multi-token prediction alone: use the method mtp, without a model, with a model "
                    "whose own checkpoint has them"
                )
            case _:
                raise ConfigError(
                    f"{about} a draft head of the kind {quote(kind)}, which is not supported: name an EAGLE-3 head or a draft model"
                )

    def choose(self, checkpoint: Checkpoint) -> BuildContext:
        """Choose kernels, types and the attention backend: the context that layers are built with."""
        config = self.config
        torch.set_num_threads(self.limits.cpu_threads)
        dtype: torch.dtype = getattr(torch, self.limits.dtype)
        self.weight_dtype = dtype
        place = self.device.torch_device
        self._native, note = self._find_native()
        is_invariant = config.model.deterministic and self.device.is_cuda
        self._notes += about_determinism(
            config.model.deterministic, self.device.kind, self.limits.dtype, self.spec, self._native is not None
        )
        if note:
            self._notes.append(note)
        if self._native is not None:
            dtype = torch.float32
            torch.set_num_threads(1)  # two thread pools on the same cores slow each other down
        self.kv_dtype = page_dtype(config, self.limits, checkpoint.weights, self._native is not None, dtype)
        self.layout = self._page_layout()
        self.attention, why = choose(
            self.spec, place, dtype, self.kv_dtype, config.model.attention_backend, self._native, self.layout,
            is_invariant=is_invariant,
        )  # fmt: skip
        if config.model.quantization == "fp8":
            check_fp8(place, dtype)
        if config.model.quantization in ("int8", "int4") and self.device.is_cuda:
            _check_rounding(config.model.quantization, dtype)
        ops = _choose_ops(self.device, dtype, self._native, is_invariant)
        adapts = self._adapts(ops)
        settings = Settings(
            place,
            dtype,
            ops,
            quantization=config.model.quantization if config.model.quantization in ("fp8", "int8", "int4") else "",
            weight_dtype=self.weight_dtype,
            packed_types=self._packed_types(checkpoint, ops),
            decodes=self.limits.decodes_packed,
            has_triton=_has_triton(self.device),
            adapts=adapts,
            around=None if self._sites is None else self._sites.around,
        )
        splits_experts = config.parallel.enable_expert_parallel and self.group.size > 1
        context = BuildContext(
            self.group, self.attention, Methods(settings), self.limits.max_model_len, splits_experts=splits_experts
        )
        if self.ranks.num_stages > 1:
            context = dataclasses.replace(context, stage=self._take_stage(checkpoint, context))
        zeros = self.device.zeros if self._native is None else self._native.zeros
        layout = self.layout.of_stage(self.stage.layers(self.spec.num_layers))
        page_size, num_ranks = config.cache.page_size, self.group.size
        self.stores = KVBuffers(self.spec, layout, self.attention, self.kv_dtype, page_size, num_ranks, zeros)
        self._notes += [why, *filter(None, [self.stores.in_words()])]
        if self.draft is not None:
            self.draft.context = self.draft.choose(self.draft.checkpoint)
        return context

    def _find_native(self) -> tuple[Native | None, str]:
        return find_native(self.config, self.limits, self.device, self._local_rank)

    def _page_layout(self) -> PageLayout:
        return self.spec.page_layout(self.limits.max_model_len)

    def _adapts(self, ops: DeviceOps) -> bool:
        """Whether adapters may change products. Raises ConfigError where they cannot."""
        if not self.config.lora.enable_lora:
            return False
        if self.spec.is_encoder:
            raise ConfigError(
                f"--enable-lora is for models that generate; {self.spec.family} is an encoder: leave it out"
            )
        match ops.kernels:
            case "native":
                return True
            case "triton":
                methods = importlib.import_module(
                    "octavo.weights.methods.triton_adapters"
                )  # by name: it imports Triton
                self._sites = methods.AdapterSites(self.weight_dtype, self.device.torch_device)
                return True
        if self.device.is_cuda:
            raise ConfigError(
                "--enable-lora on a GPU needs the package triton, and --dtype bfloat16 or float16: torch's kernels would compute here"
            )
        raise ConfigError(
            "--enable-lora on a CPU needs native kernels, and torch's would compute here: leave it out, or build them"
        )

    def _take_stage(self, checkpoint: Checkpoint, context: BuildContext) -> Stage:
        """Divide the layers over the stages, as every rank does, and take this rank's."""
        num_layers, (count, index) = self.spec.num_layers, (self.ranks.num_stages, self.ranks.stage)
        self._outline = Outline.of(checkpoint, self.spec, context)
        setting = self.config.parallel.pipeline_layer_split
        if setting == AUTO:
            starts, how = self._outline.split(count), "by counted cost"
        else:
            starts, how = read_split(setting, count, num_layers), "as asked"
        self.stage = stage_of(index, starts, num_layers)
        self._notes.append(f"{count} pipeline stages of {in_words(starts, num_layers)} ({how})")
        return self.stage

    def _packed_types(self, checkpoint: Checkpoint, ops: DeviceOps) -> frozenset[str]:
        """Types in which weights arrive at the layers; the reader decodes all others."""
        if not self.limits.keeps_packed:
            return frozenset()
        if checkpoint.weights is None:
            # Random weights are made packed only for a GPU's kernels.
            types = dummy_packed_types(checkpoint.config)
            return self._packed_on_gpu(types, None) if ops.kernels == "triton" else frozenset()
        match ops.kernels:
            case "native":
                return kept_on_cpu(checkpoint.weights.packed_types)
            case "triton":
                return self._packed_on_gpu(checkpoint.weights.packed_types, checkpoint.weights)
            case _:
                return frozenset()

    def _packed_on_gpu(self, types: frozenset[str], weights: TensorSource | None) -> frozenset[str]:
        """Of the packed types in a checkpoint, those that stay packed on a GPU. `weights`: None: they are random."""
        kept = kept_on_gpu(types)
        if not kept or not self.device.is_cuda:
            return kept
        decoded = 0
        if weights is not None:
            decoded = weights.held_bytes(getattr(torch, self.limits.dtype).itemsize, {}) // self.ranks.world.size
        # Of the whole memory and the share that was asked for: every rank must decide alike.
        usable = self.device.memory_use().total * self.config.cache.gpu_memory_utilization
        is_tight = self.config.model.quantization == "packed" or decoded > MOST_DECODED * usable
        stays = packed_on_gpu(
            kept,
            is_tight=is_tight,
            has_experts=self.spec.num_experts > 0,
            has_8_bit_floats=self.device.has_8_bit_floats,
        )
        if stays < kept:
            self._notes.append(
                f"{', '.join(sorted(kept - stays))} weights are decoded to {self.limits.dtype}"
                + ("" if is_tight else ": they fit, and products of many rows are faster so (--quantization packed)")
            )
        return stays

    def build(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        """Build the model with memory for its weights, none of them loaded yet."""
        family = load_family(checkpoint.config["model_type"])
        self.model = family.Model(checkpoint.config, self.spec, context)
        settings = context.methods.settings
        how = settings.quantization
        is_rounded = how == "fp8" or (how in ("int8", "int4") and self.device.is_cuda)
        if is_rounded and any(isinstance(module, Experts) for module in self.model.modules()):
            self._notes.append(f"--quantization {how} leaves the experts in {self.limits.dtype}")
        elsewhere = frozenset[str]() if self._outline is None else self._outline.without(self.model)
        share = 1.0 if self._outline is None else self._outline.share_of(self.model)
        self.weights = RankWeights(
            self.model,
            self.config.model,
            self.weight_dtype,
            self.device,
            self.group.size,
            context.methods,
            elsewhere,
            share,
        )

    def _measure(self, ops: DeviceOps) -> DeviceMemory:
        """Measure the memory that steps of the largest size take, run over a store of one page."""
        limits = self.limits
        with torch.inference_mode(), memory_errors(limits.dtype, self.device.memory_available()):
            runner = self._runner = self._make_runner(limits.max_model_len)
            self.stores.allocate(1, self._max_batch_rows)
            trials = TrialSteps(runner, self.spec, limits)
            if ops.kernels == "triton":
                trials.warm_up()
            # Adapters keep gates apart from their products: such steps take more.
            with nullcontext() if self._sites is None else self._sites.rehearsed():
                return measure(
                    self.device,
                    trials.run,
                    most_tokens(limits),
                    limits.max_num_seqs,
                    num_graphs=0 if runner.graphs is None else self._num_graphs,
                    num_pools=1 if self.draft is None else 2,
                    staging_bytes=self._staging_bytes(),
                    is_alone=self._num_local_ranks == 1,
                )

    @property
    def _num_graphs(self) -> int:
        """Captured steps that memory is left for: of each size, and where there are adapters, with those of attention and of all products."""
        num_sizes = len(ladder(self._max_batch_rows))
        return num_sizes * ((1 if self._sites is None else 3) + (self.draft is not None))

    @property
    def _max_batch_rows(self) -> int:
        """Rows that attention may get in a step. In a captured one drafted tokens are rows of their own."""
        return most_samples(self.limits.max_num_seqs) if self._drafts_on_gpu else self.limits.max_num_seqs

    @property
    def _drafts_on_gpu(self) -> bool:
        return self.device.is_cuda and speculation_of(self.config.scheduler.speculative_config, is_gpu=True) is not None

    def _staging_bytes(self) -> int:
        """What copies between the device and the host take on the device."""
        cache, page_bytes = self.config.cache, self.stores.page_bytes
        swap = 2 * max(STAGING_BYTES, page_bytes) if cache.swap_space else 0
        swap *= 1 if self.draft is None else 1 + self.draft.num_stores  # what a draft has of pages is copied apart
        return swap + (page_transfer.staging_bytes(page_bytes) if cache.kv_tier else 0)

    def allocate(self, num_pages: int, num_host_pages: int) -> tuple[Runner, list[str]]:
        """Allocate the number of pages that the executor decided on. → the runner, ready to run steps, and notes for the report."""
        notes: list[str] = []
        limits = self.limits
        with torch.inference_mode(), memory_errors(limits.dtype, self.device.memory_available()):
            stores = self.stores.allocate(num_pages, self._max_batch_rows)
            pages = Pages(stores, self.attention.page_dim, self.device, num_host_pages)
            if self._runner is None:  # on a GPU, the tables were allocated before the measurement
                longest = self.stores.longest(num_pages, limits.max_model_len, limits.max_num_batched_tokens)
                self._runner = self._make_runner(longest)
                self._runner.steps, notes = self._tape(most_tokens(limits))
            runner = self._runner
            runner.pages, runner.links = pages, self.ranks.links
            if self.draft is not None:
                runner.draft, more = self.draft.allocate_beside(num_pages, num_host_pages, runner)
                notes += more
        # Not on a CPU, where memory is shared with weights and pages: there the first grammar waits half a second for it.
        if self.device.is_cuda and not self.spec.is_encoder and self.stage.is_last:
            runner.rows.sampling.grammars.warm_later(_START_S)
        return runner, notes

    def time_steps(self) -> TrialSeconds:
        """After allocate(); all ranks call this together. 0 for encoders and stages; `verified` also where no request drafts, `draft` without
        a draft model. On a GPU all are 0 where no request drafts, and where steps are not captured."""
        assert self._runner is not None, "allocate() comes first"
        is_gpu = self.device.is_cuda
        drafts = speculation_of(self.config.scheduler.speculative_config, is_gpu=is_gpu) is not None
        is_apart = self.spec.is_encoder or self.stage.count > 1
        if is_apart or (is_gpu and not (drafts and self._runner.graphs is not None)):
            return TrialSeconds()
        with torch.inference_mode():
            trials = TrialSteps(self._runner, self.spec, self.limits)
            verified = trials.time_verification() if drafts else 0.0
            return TrialSeconds(trials.time_one_row(), verified, trials.time_draft())

    def _make_runner(self, max_model_len: int) -> Runner:
        limits, page_size, vocab_size = self.limits, self.config.cache.page_size, self.spec.vocab_size
        staging = Staging(self.device)
        vocabulary = functools.partial(_vocabulary, self.source, self.config.model.tokenizer)
        speculation = speculation_of(self.config.scheduler.speculative_config, self.device.is_cuda)
        drafts = speculation is not None and speculation.asks_grammars and self.stage.count == 1
        num_forced = speculation.most if speculation is not None and drafts else 0
        rows = RowState(
            limits.max_num_seqs,
            max_model_len,
            page_size,
            vocab_size,
            self.device,
            staging,
            self.layout.windows,
            Grammars(
                vocab_size,
                vocabulary,
                limits.cpu_threads if self.device.is_cuda else 1,  # a CPU is busy
                2 * limits.max_num_seqs,
                GrammarLimits(
                    # Twice what the check of the request may take: it compiles for a smaller vocabulary.
                    2 * self.config.budget.grammar_seconds,
                    self.config.scheduler.grammar_step_seconds,
                    2 * int(self.config.budget.grammar_memory_bytes),
                    num_forced=num_forced,
                ),
                self.group.highest if self.group.size > 1 else None,
            ),
            self.stage.is_last,
        )
        graphs: Graphs | None = None
        can_capture = self.device.is_cuda and self.attention.can_capture
        # Ranks communicate in the middle of a step, which is not captured yet.
        if (
            can_capture
            and not self.config.model.enforce_eager
            and self.group.size == 1
            and self.stage.count <= _MAX_STAGES
        ):
            graphs = Graphs(self.device, rows, self.model, self._max_batch_rows, self._sites)
        runner = Runner(self.device, self.model, rows, staging, limits.max_num_seqs, self._native, graphs)
        runner.adapters = self.adapters
        return runner

    def _tape(self, max_tokens: int) -> tuple[CpuSteps | None, list[str]]:
        """Steps as one native call each; None: they run operation by operation. And notes for the report."""
        # Ranks communicate in the middle of a step, which a tape cannot record.
        if self._native is None or self.config.model.enforce_eager or self.group.size > 1 or self.spec.is_encoder:
            return None, []
        steps: CpuSteps | str = f"attention is by {self.attention.name}"
        if self.attention.name == NativeCpuAttention.name:
            num_samples, num_groups = most_samples(self.limits.max_num_seqs), len(self.layout.windows)
            steps = record(self.model, self._native, max_tokens, num_samples, num_groups)
        if isinstance(steps, str):
            return None, [f"steps run operation by operation: {steps}"]
        return steps, []

    def report(self, dtype: torch.dtype, memory: DeviceMemory | None) -> LoadReport:
        limits, page_bytes = self.limits, self.stores.page_bytes
        weights_bytes, in_bfloat16 = self.model.weights_bytes, self.weights.in_bfloat16()
        draft = self.draft
        if draft is not None:
            page_bytes += draft.page_bytes
            weights_bytes += draft.model.weights_bytes
            in_bfloat16 += (draft.weights.in_bfloat16() or draft.model.weights_bytes) if in_bfloat16 else 0
        place = self.device.torch_device
        has_8_bits = memory is not None and self.kv_dtype == dtype
        has_8_bits = has_8_bits and self.attention.supports(self.spec, place, dtype, torch.float8_e4m3fn) is None
        saving = 0 if memory is None else self.weights.offered_saving(dtype)
        host_available = self._host_available()
        if self.adapters is not None and self._sites is None:
            host_available = max(0, host_available - self._adapter_bytes)
        return LoadReport(
            device=self.device.describe(limits.cpu_threads),
            dtype=limits.dtype,
            vocab_size=self.spec.vocab_size,
            max_model_len=limits.max_model_len,
            max_model_len_is_auto=limits.max_model_len_is_auto,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weights_bytes=weights_bytes,
            page_bytes=page_bytes,
            available_bytes=host_available if memory is None else memory.for_pages,
            host_available_bytes=host_available,
            notes=self._notes,
            memory=memory,
            fp8_weights_bytes=self.model.weights_bytes - saving if saving else 0,
            bfloat16_weights_bytes=in_bfloat16,
            # With native kernels, arithmetic and pages stay float32 whatever --dtype is.
            bfloat16_page_bytes=page_bytes // 2 if self._native is None and self.kv_dtype == dtype else page_bytes,
            fp8_page_bytes=page_bytes // dtype.itemsize if has_8_bits else 0,
            hidden_size=self.model.vector_size or self.spec.hidden_size,
            can_generate=not self.spec.is_encoder,
            num_labels=self.spec.num_labels,
            kv_dtype=name_of(self.kv_dtype),
            windows=self.layout.windows,
            stage=self.stage.index,
            adapter_bytes=self._adapter_bytes,
            adapter_itemsize=0 if self.adapters is None else self.adapters.itemsize,
            draft_len=0 if draft is None else draft.limits.max_model_len,
            draft_method="" if draft is None else draft.method,
        )


def check_parallel(spec: ModelSpec, config: ParallelConfig) -> None:
    """Refuse ways to divide a model that it does not support."""
    if spec.is_encoder and config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size}: an encoder such as {spec.family} is not divided into stages; "
            "use --tensor-parallel-size"
        )
    check_stages(config.pipeline_parallel_size, spec.num_layers)
    if config.pipeline_layer_split != AUTO:
        read_split(config.pipeline_layer_split, config.pipeline_parallel_size, spec.num_layers)
    if config.enable_expert_parallel and not spec.num_experts:
        raise ConfigError(
            f"--enable-expert-parallel is for mixtures of experts, and a {spec.family} model has none: leave it out"
        )
    if config.enable_expert_parallel and spec.num_experts % config.tensor_parallel_size:
        sizes = [n for n in range(1, spec.num_experts + 1) if spec.num_experts % n == 0]
        raise ConfigError(
            f"--enable-expert-parallel: {config.tensor_parallel_size} ranks (--tensor-parallel-size) do not divide this model's "
            f"{spec.num_experts} experts; sizes that do: {', '.join(map(str, sizes))}"
        )


def _choose_ops(device: Device, dtype: torch.dtype, native: Native | None, is_invariant: bool) -> DeviceOps:
    """Pick native kernels on a CPU, Triton's on a GPU with a 16-bit dtype, otherwise torch."""
    if native is not None:
        return NativeOps(native)
    if not _has_triton(device) or dtype == torch.float32:
        return torch_ops(device.torch_device, dtype)
    kernels = importlib.import_module("octavo.kernels.triton.device_ops")  # by name: Triton may not be installed
    ops: DeviceOps = kernels.InvariantTritonOps() if is_invariant else kernels.TritonOps()
    return ops


def _has_triton(device: Device) -> bool:
    return device.is_cuda and importlib.util.find_spec("triton") is not None


def _vocabulary(source: ModelSource, tokenizer: str) -> "Vocabulary":
    from octavo.text import load_text  # imported here: only grammars need it, and it would slow down the start

    return load_text(source.path, tokenizer=tokenizer).vocabulary.alone()


def _check_rounding(how: str, dtype: torch.dtype) -> None:
    """Raises ConfigError where --quantization int8 or int4 has no kernels on a GPU. For before anything is loaded."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"--quantization {how} works with 16-bit arithmetic on a GPU: use it with --dtype bfloat16 or float16"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"--quantization {how} needs the package triton, which is not installed")
