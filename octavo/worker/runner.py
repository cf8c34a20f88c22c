"""Runner: one rank. A StepPlan becomes a Batch, hidden states, logits and tokens, and nothing else happens here.
Knows nothing of requests, of other ranks' processes, or of why the plan is what it is."""

import importlib
from typing import TYPE_CHECKING

import msgspec
import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.choose import choose
from octavo.attention.native_cpu import NativeCpuAttention
from octavo.batch import Batch
from octavo.config import Config
from octavo.device import Device, pick
from octavo.kernels.triton.runtime.batch_sizes import ladder
from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts
from octavo.layers.mlp import warm_up_gates
from octavo.layers.model import DecoderModel
from octavo.limits import Limits, hold_whole_prompts, resolve
from octavo.messages import DeviceMemory, LoadReport, PoolingParams, SamplingParams, StepPlan
from octavo.models import load_family
from octavo.parallel import Group
from octavo.sampling.grammar.masks import Grammars
from octavo.spec import ModelSpec, PageLayout
from octavo.weights.formats.checkpoint import Checkpoint, naming, open_checkpoint
from octavo.weights.methods.base import Settings
from octavo.weights.methods.registry import Methods
from octavo.weights.methods.torch_fp8 import check_fp8
from octavo.weights.sources.source import ModelSource
from octavo.worker.assemble import Columns, assemble, shared_in
from octavo.worker.choices import choose_ops, has_triton, name_of, page_dtype
from octavo.worker.cores import usable_cores
from octavo.worker.cpu_steps import CpuSteps, find_native, held, record
from octavo.worker.determinism import about_determinism
from octavo.worker.fingerprint import fingerprint_of
from octavo.worker.graphs import Graphs, is_plain_greedy
from octavo.worker.kv_buffers import KVBuffers
from octavo.worker.memory.measure import DEMANDING, measure, memory_errors, trial_columns
from octavo.worker.pages import STAGING_BYTES, Pages
from octavo.worker.pooling import take_pooled
from octavo.worker.rows import PageChanges, Rows
from octavo.worker.scoring import sample_scored, score_prompts, wants_prompt_scores
from octavo.worker.staging import Staging
from octavo.worker.step import Extras, Step
from octavo.worker.weights import Weights

if TYPE_CHECKING:
    from octavo.text.tokenize.vocabulary import Vocabulary

_WARMUP_SIZES = (1, 2, 4, 8, 16, 32, 64)  # products with few rows have kernels of their own
_GPU_PACKING = "MXFP4"  # what GPU kernels multiply as it is stored
_START_S = 2.0  # after which a start is over, and there is time for what a first grammar would wait for
_MAX_UNCOLLECTED = 2  # as executor.base says


class Runner:
    """load(), then allocate(), then launch() once per step."""

    spec: ModelSpec
    limits: Limits
    model: DecoderModel
    weights: Weights
    layout: PageLayout
    attention: AttentionBackend
    stores: KVBuffers
    rows: Rows
    pages: Pages
    staging: Staging

    def __init__(self, config: Config, source: ModelSource, rank: int = 0, group: Group | None = None) -> None:
        self.config = config
        self.source = source
        self.group = group or Group.single()
        self.device: Device = pick(config.model.device, rank)
        self.graphs: Graphs | None = None
        self.steps: CpuSteps | None = None
        self._notes: list[str] = []

    def load(self) -> LoadReport:
        """Read the weights. Says what is left for pages, once every rank has read its own."""
        checkpoint = self.open()
        context = self.choose_kernels(checkpoint)
        available = self.device.memory_available()
        with torch.inference_mode(), memory_errors(self.limits.dtype, available):
            self.build(checkpoint, context)
            self._notes += self.weights.fill(checkpoint, available)
        if self._native is not None:
            self._notes.append(held(self.model))
        self.group.barrier()  # ranks on one machine share its memory: measure when all have taken their part
        report = self.report(context.dtype, self._measure() if self.device.is_cuda else None)
        if self.group.rank:
            return report
        parts = fingerprint_of(
            context, self.config.model, self.source, self.spec, self.model, report.kv_dtype, self.device.chip
        )
        return msgspec.structs.replace(report, fingerprint=parts)

    def open(self) -> Checkpoint:
        """Read what the files say of themselves, and settle what follows from it: spec and limits."""
        is_dummy = self.config.model.load_format == "dummy"
        checkpoint = open_checkpoint(self.source, allow_missing_weights=is_dummy)
        family = load_family(checkpoint.config["model_type"])
        with naming(checkpoint.config_path):
            self.spec = family.spec(checkpoint.config)
        self.limits = resolve(
            self.config,
            device=self.device.kind,
            stored_dtype=checkpoint.stored_dtype,
            context_len=self.spec.context_len,
            num_cores=usable_cores(),
            longest_len=self.spec.longest_len,
        )
        if self.spec.is_encoder:
            self.limits = hold_whole_prompts(self.limits, self.config)
        return checkpoint

    def build(self, checkpoint: Checkpoint, context: BuildContext) -> None:
        """The model, with room for its weights and none of them in it."""
        family = load_family(checkpoint.config["model_type"])
        self.model = family.Model(checkpoint.config, self.spec, context)
        if context.methods.settings.quantization == "fp8" and any(
            isinstance(module, Experts) for module in self.model.modules()
        ):
            self._notes.append(f"--quantization fp8 leaves the experts in {self.limits.dtype}")
        keeps_packed = self._keeps_packed and checkpoint.weights is not None and checkpoint.weights.has_packed
        self.weights = Weights(
            self.model, self.config.model, self.weight_dtype, self.device, self.group.size, keeps_packed
        )

    def choose_kernels(self, checkpoint: Checkpoint) -> BuildContext:
        """Who computes, in which types: what the layers are built with."""
        config = self.config
        torch.set_num_threads(self.limits.cpu_threads)
        dtype: torch.dtype = getattr(torch, self.limits.dtype)
        self.weight_dtype = dtype
        place = self.device.torch_device
        self._native, note = find_native(config, self.limits, self.device, self.group.rank)
        self._is_invariant = config.model.deterministic and self.device.is_cuda
        self._notes += about_determinism(
            config.model.deterministic, self.device.kind, self.limits.dtype, self.spec, self._native is not None
        )
        if note:
            self._notes.append(note)
        if self._native is not None:
            dtype = torch.float32
            torch.set_num_threads(1)  # two pools on the same cores only get in each other's way
        self.kv_dtype = page_dtype(config, self.limits, checkpoint.weights, self._native is not None, dtype)
        self.layout = self.spec.page_layout(self.limits.max_model_len)
        self.attention, why = choose(
            self.spec, place, dtype, self.kv_dtype, config.model.attention_backend, self._native, self.layout,
            is_invariant=self._is_invariant,
        )  # fmt: skip
        zeros = self.device.zeros if self._native is None else self._native.zeros
        page_size, ranks = config.cache.page_size, self.group.size
        self.stores = KVBuffers(self.spec, self.layout, self.attention, self.kv_dtype, page_size, ranks, zeros)
        self._notes += [why, *filter(None, [self.stores.in_words()])]
        if config.model.quantization == "fp8":
            check_fp8(place, dtype)
        self._ops = choose_ops(self.device, dtype, self._native, self._is_invariant)
        packing = "" if checkpoint.weights is None else checkpoint.weights.packing
        has_kernels = self._native is not None or (self._has_triton_ops and packing == _GPU_PACKING)
        self._keeps_packed = self.limits.keeps_packed and has_kernels
        settings = Settings(
            place,
            dtype,
            self._ops,
            quantization=config.model.quantization if config.model.quantization in ("fp8", "int8", "int4") else "",
            weight_dtype=self.weight_dtype,
            keeps_packed=self._keeps_packed,
            decodes=self.limits.decodes_packed,
            has_triton=has_triton(self.device),
        )
        return BuildContext(self.group, self.attention, Methods(settings), self.limits.max_model_len)

    @property
    def _has_triton_ops(self) -> bool:
        return self.device.is_cuda and self._ops.name.startswith("triton")

    def _measure(self) -> DeviceMemory:
        """What steps of the largest size take, run over a store of one page."""
        limits, cache = self.limits, self.config.cache
        with torch.inference_mode(), memory_errors(limits.dtype, self.device.memory_available()):
            self._seat(limits.max_model_len)
            self.stores.allocate(1, limits.max_num_seqs)
            self._warm_up()
            return measure(
                self.device,
                self._try,
                self._most_tokens(),
                limits.max_num_seqs,
                num_graphs=len(ladder(limits.max_num_seqs)) if self.graphs is not None else 0,
                staging_bytes=2 * max(STAGING_BYTES, self.stores.page_bytes) if cache.swap_space else 0,
                is_alone=self.group.size == 1,
            )

    def _most_tokens(self) -> int:
        """What a step can have: a prompt is in it once."""
        return min(self.limits.max_num_batched_tokens, self.limits.max_num_seqs * self.limits.max_model_len)

    def _warm_up(self) -> None:
        """Compile the kernels that first requests need, all at once: one after the other they take several times as long."""
        if not self._has_triton_ops:
            return
        num_tokens, num_rows = self._most_tokens(), min(self.limits.max_num_seqs, self._most_tokens())
        chunk = max(1, min(32, self.limits.max_model_len // 2))
        with importlib.import_module("octavo.kernels.triton.runtime.warmup").warmup(usable_cores()):
            sizes = ((1, 1, 0), (num_rows, num_rows, 0), (num_tokens, num_rows, 0), (chunk, 1, chunk))
            for tokens, rows, prefix_len in sizes:
                self._try(tokens, rows, rows > 1, prefix_len)
                self.rows.tokens.zero_()  # nothing was sampled: what was stored is no token
            warm_up_gates(self.model, num_tokens)
            for size in _WARMUP_SIZES:
                if self.graphs is not None and size <= self.limits.max_num_seqs:
                    self.graphs.warm_up(size, is_shared=False)
                    self.graphs.warm_up(size, is_shared=True)
        self.rows.tokens.zero_()

    def _try(self, num_tokens: int, num_rows: int, is_plain: bool, prefix_len: int = 0) -> None:
        """A step as a request may cause it; is_plain: sampled greedily. `prefix_len`: tokens that each row has already."""
        for row in range(num_rows):
            self.rows.sampling.enter(row, SamplingParams(temperature=0.0) if is_plain else DEMANDING, 0, 1, [])
        if self.spec.is_encoder:
            self.rows.pooling = dict.fromkeys(range(num_rows), PoolingParams("mean"))
        columns = trial_columns(num_tokens, num_rows)
        columns.lens += 0 if self.spec.is_encoder else prefix_len
        self._compute(columns)
        for row in range(num_rows):  # what nobody asks for any more must cost nothing
            self.rows.sampling.leave(row)

    def allocate(self, num_pages: int, num_host_pages: int) -> list[str]:
        """Take the memory that the executor settled on; from now on steps can run. → what there is to say of them."""
        notes: list[str] = []
        limits = self.limits
        with torch.inference_mode(), memory_errors(limits.dtype, self.device.memory_available()):
            stores = self.stores.allocate(num_pages, limits.max_num_seqs)
            self.pages = Pages(stores, self.attention.page_dim, self.device, num_host_pages)
            if not self.device.is_cuda:  # there, the tables were taken before the measurement
                self._seat(self.stores.longest(num_pages, limits.max_model_len, limits.max_num_batched_tokens))
                notes = self._record()
        # A CPU's memory is what weights and pages live in too: there the first grammar waits for the vocabulary, half a second.
        if self.device.is_cuda and not self.spec.is_encoder:
            self.rows.sampling.grammars.warm_later(_START_S)
        return notes

    def _record(self) -> list[str]:
        # Ranks talk to each other in the middle of a step, which no tape can hold.
        if self._native is None or self.config.model.enforce_eager or self.group.size > 1 or self.spec.is_encoder:
            return []
        steps: CpuSteps | str = f"attention is by {self.attention.name}"
        if self.attention.name == NativeCpuAttention.name:
            num_rows, num_groups = self.limits.max_num_seqs, len(self.layout.windows)
            steps = record(self.model, self._native, self._most_tokens(), num_rows, num_groups)
        if isinstance(steps, str):
            return [f"steps run operation by operation: {steps}"]
        self.steps = steps
        return []

    def _seat(self, max_model_len: int) -> None:
        limits, page_size, vocab_size = self.limits, self.config.cache.page_size, self.spec.vocab_size
        self.staging = Staging(self.device)
        self.rows = Rows(
            limits.max_num_seqs,
            max_model_len,
            page_size,
            vocab_size,
            self.device,
            self.staging,
            self.layout.windows,
            Grammars(vocab_size, self._vocabulary, limits.cpu_threads if self.device.is_cuda else 1),  # a CPU is busy
        )
        can_capture = self.device.is_cuda and self.attention.can_capture
        # Ranks talk to each other in the middle of a step; that is not captured yet.
        if can_capture and not self.config.model.enforce_eager and self.group.size == 1:
            self.graphs = Graphs(self.device, self.rows, self.model, limits.max_num_seqs)
        self._answers = [self.device.pinned((limits.max_num_seqs,), torch.int64) for _ in range(_MAX_UNCOLLECTED + 1)]

    def _vocabulary(self) -> "Vocabulary":
        from octavo.text import load_text  # for grammars alone: a start need not wait for it

        return load_text(self.source.path, tokenizer=self.config.model.tokenizer).vocabulary.alone()

    def launch(self, plan: StepPlan) -> Step:
        """Start one step. Sampled tokens stay in the token table, where the next step finds its inputs."""
        step = self._launch(plan)
        self.rows.sampling.grammars.started(step)
        return step

    def _launch(self, plan: StepPlan) -> Step:
        with torch.inference_mode():
            self.pages.move(plan.moves)
            self.rows.leave(plan.leaves)
            self.rows.force(plan.forced)
            columns = Columns.of(plan)
            can_repeat = not plan.enters and self.rows.pooling.keys().isdisjoint(plan.rows)
            if self.graphs is not None and can_repeat and columns.is_steady:
                changes = self.rows.note_pages(plan)
                if self.graphs.can_run(len(columns.rows), changes):
                    return self._repeat(plan.step, self.graphs, columns, changes)
            self.rows.update(plan)
            if not plan.rows:
                return Step(plan.step, None, None)
            return self._send_home(plan.step, *self._compute(columns))

    def _compute(self, columns: Columns) -> tuple[torch.Tensor | None, Extras | None]:
        """A step of any shape, kernel by kernel → the tokens [S] it sampled, and what else its rows want."""
        assembled = assemble(columns, self.rows, self.staging)
        extras: Extras | None = None
        if self.rows.pooling.keys().isdisjoint(assembled.sample_rows.tolist()) and not wants_prompt_scores(
            self.rows.sampling, columns
        ):
            if not self.device.is_cuda:  # tokens are here; a GPU's are on their way, and its pass runs beside us anyway
                self.rows.sampling.grammars.begin(assembled.sample_rows, assembled.sample_lens)
            logits = self._logits(assembled.batch)
        else:
            hidden = self.model.forward(assembled.batch)
            prompt_scores = score_prompts(self.model, hidden, self.rows, columns, assembled.last)
            counts = columns.counts[columns.samples]
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
            logits = self.steps.run(batch)
            return logits if len(logits) else None
        hidden = self.model.forward(batch)
        if not len(batch.sample_at):
            return None
        return self.model.logits(hidden.index_select(0, batch.sample_at))

    def _repeat(self, number: int, graphs: Graphs, columns: Columns, changes: PageChanges) -> Step:
        """A step in which every row adds one token: a graph's replay."""
        rows, lens = columns.rows, columns.lens
        shared = shared_in(self.rows, rows, lens)
        logits = graphs.run(rows, lens, changes, shared, is_plain_greedy(self.rows.sampling, rows, lens))
        extras: Extras | None = None
        if logits is not None:
            tokens, extras = sample_scored(logits, self.rows, rows, lens)
            graphs.store(tokens)
            extras = None if extras is None else extras.sent_home()
        done = self.device.event()
        done.record()
        return Step(number, graphs.answer(len(rows)), done, extras)

    def _send_home(self, number: int, tokens: torch.Tensor | None, extras: Extras | None) -> Step:
        if not self.device.is_cuda or (tokens is None and extras is None):
            return Step(number, tokens, None, extras)
        extras = None if extras is None else extras.sent_home()
        home = None
        if tokens is not None:
            home = self._answers[number % len(self._answers)][: len(tokens)]
            home.copy_(tokens, non_blocking=True)
        done = self.device.event()
        done.record()
        return Step(number, home, done, extras)

    def report(self, dtype: torch.dtype, memory: DeviceMemory | None) -> LoadReport:
        limits, page_bytes = self.limits, self.stores.page_bytes
        place = self.device.torch_device
        has_8_bits = memory is not None and self.kv_dtype == dtype
        has_8_bits = has_8_bits and self.attention.supports(self.spec, place, dtype, torch.float8_e4m3fn) is None
        saving = 0 if memory is None else self.weights.offered_saving(dtype)
        host_available = pick("cpu").memory_available() // self.group.size
        return LoadReport(
            device=self.device.describe(limits.cpu_threads),
            dtype=limits.dtype,
            vocab_size=self.spec.vocab_size,
            max_model_len=limits.max_model_len,
            max_model_len_is_auto=limits.max_model_len_is_auto,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weights_bytes=self.model.weights_bytes,
            page_bytes=page_bytes,
            available_bytes=host_available if memory is None else memory.for_pages,
            host_available_bytes=host_available,
            notes=self._notes,
            memory=memory,
            fp8_weights_bytes=self.model.weights_bytes - saving if saving else 0,
            bfloat16_weights_bytes=self.weights.in_bfloat16(),
            # Native kernels compute in float32 then, too, and so do their pages hold it.
            bfloat16_page_bytes=page_bytes // 2 if self._native is None and self.kv_dtype == dtype else page_bytes,
            fp8_page_bytes=page_bytes // dtype.itemsize if has_8_bits else 0,
            hidden_size=self.model.vector_size or self.spec.hidden_size,
            can_generate=not self.spec.is_encoder,
            kv_dtype=name_of(self.kv_dtype),
            windows=self.layout.windows,
        )
