"""Runner: one rank. A StepPlan becomes a Batch, hidden states, logits and tokens, and nothing else happens here.
Knows nothing of requests, of other ranks' processes, or of why the plan is what it is."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo import config as settings
from octavo.attention.base import AttentionBackend
from octavo.attention.choose import choose
from octavo.config import Config, Limits
from octavo.device import Device, pick
from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.model import DecoderModel
from octavo.messages import LoadReport, StepPlan, StepResult
from octavo.models import load_family
from octavo.parallel import Group
from octavo.sampling.sampler import sample
from octavo.spec import ModelSpec
from octavo.weights.checkpoint import Checkpoint, naming, open_checkpoint
from octavo.weights.dummy import dummy_tensors
from octavo.weights.source import ModelSource
from octavo.worker.assemble import assemble
from octavo.worker.cores import usable_cores
from octavo.worker.memory import in_words
from octavo.worker.pages import PageStore
from octavo.worker.rows import Rows


class Runner:
    """load(), then allocate(), then run() once per step."""

    spec: ModelSpec
    limits: Limits
    model: DecoderModel
    attention: AttentionBackend
    rows: Rows
    pages: PageStore

    def __init__(self, config: Config, source: ModelSource, rank: int = 0, group: Group | None = None) -> None:
        self.config = config
        self.source = source
        self.group = group or Group.single()
        self.device: Device = pick(config.model.device, rank)

    def load(self) -> LoadReport:
        """Read the weights. Says what is left for pages, once every rank has read its own."""
        config = self.config
        is_dummy = config.model.load_format == "dummy"
        checkpoint = open_checkpoint(self.source, allow_missing_weights=is_dummy)
        family = load_family(checkpoint.config["model_type"])
        with naming(checkpoint.config_path):
            self.spec = family.spec(checkpoint.config)
        self.limits = settings.resolve(
            config,
            device=self.device.kind,
            stored_dtype=checkpoint.stored_dtype,
            context_len=self.spec.context_len,
            num_cores=usable_cores(),
        )
        torch.set_num_threads(self.limits.cpu_threads)
        dtype: torch.dtype = getattr(torch, self.limits.dtype)
        place = self.device.torch_device
        self.attention = choose(self.spec, place, dtype)
        context = BuildContext(self.group, dtype, place, self.attention, config.cache.page_size)
        available = self.device.memory_available()
        with torch.inference_mode(), _memory_errors(self.limits.dtype, available):
            self.model = family.Model(checkpoint.config, self.spec, context)
            self._fill(checkpoint, dtype, available)
        self.group.barrier()  # ranks on one machine share its memory: measure when all have taken their part
        return self._report(dtype)

    def allocate(self, num_pages: int, num_host_pages: int) -> None:
        """Take the memory that the executor settled on; from now on steps can run."""
        limits, page_size = self.limits, self.config.cache.page_size
        dtype: torch.dtype = getattr(torch, limits.dtype)
        with torch.inference_mode(), _memory_errors(limits.dtype, self.device.memory_available()):
            # Zeros: a page's unwritten slots are read with weight 0, and 0 times a NaN that memory happened to hold is NaN.
            layers = [self.device.zeros(self._store_shape(num_pages), dtype) for _ in range(self.spec.num_layers)]
            host_layers = [
                self.device.pinned(self._store_shape(num_host_pages), dtype)
                for _ in range(self.spec.num_layers if num_host_pages else 0)
            ]
            self.pages = PageStore(layers, host_layers, self.attention.page_dim)
            self.attention.bind(layers)
            max_model_len = min(limits.max_model_len, num_pages * page_size)
            self.rows = Rows(
                limits.max_num_seqs, max_model_len, page_size, self.spec.vocab_size, self.device.torch_device
            )

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one step. Sampled tokens stay in the token table, where the next step finds its inputs."""
        with torch.inference_mode():
            self.pages.move(plan.moves)
            self.rows.update(plan)
            if not plan.rows:
                return StepResult(plan.step, [])
            assembled = assemble(plan, self.rows)
            hidden = self.model.forward(assembled.batch)
            if not len(assembled.sample_rows):
                return StepResult(plan.step, [])
            logits = self.model.logits(hidden.index_select(0, assembled.batch.sample_at))
            tokens = sample(logits, self.rows.tokens, self.rows.sampling, assembled.sample_rows, assembled.sample_lens)
            self.rows.write(assembled.sample_rows, assembled.sample_lens, tokens)
            return StepResult(plan.step, tokens.tolist())

    def _fill(self, checkpoint: Checkpoint, dtype: torch.dtype, available: int) -> None:
        shapes = {name: slot.shape for name, slot in self.model.slots().items() if not slot.is_optional}
        needed = sum(map(math.prod, shapes.values())) * dtype.itemsize // self.group.size
        if needed > available:
            raise ConfigError(_weights_too_large(needed, self.limits.dtype, available))
        if self.config.model.load_format == "dummy":
            tensors = dummy_tensors(shapes, self.device.torch_device, dtype)
        else:
            tensors = checkpoint.tensors(self.device.torch_device, dtype)
        self.model.load(tensors)

    def _report(self, dtype: torch.dtype) -> LoadReport:
        limits = self.limits
        page_bytes = math.prod(self._store_shape(1)) * dtype.itemsize * self.spec.num_layers
        host_available = pick("cpu").memory_available() // self.group.size
        return LoadReport(
            device=self.device.describe(),
            dtype=limits.dtype,
            vocab_size=self.spec.vocab_size,
            max_model_len=limits.max_model_len,
            max_model_len_is_auto=limits.max_model_len_is_auto,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weights_bytes=self.model.weights_bytes,
            page_bytes=page_bytes,
            available_bytes=self._left_on_gpu(dtype) if self.device.is_cuda else host_available,
            host_available_bytes=host_available,
            notes=[f"attention by {self.attention.name}"],
        )

    def _left_on_gpu(self, dtype: torch.dtype) -> int:
        """Bytes for pages: the share of the GPU that is ours, less what is taken, less what a step works with."""
        spec, limits = self.spec, self.limits
        share = int(self.device.memory_total() * self.config.cache.gpu_memory_utilization)
        taken = self.device.memory_total() - self.device.memory_available()
        per_token = 8 * spec.hidden_size + 3 * (spec.intermediate_size + spec.num_heads * spec.head_size)
        working = limits.max_num_batched_tokens * per_token * dtype.itemsize
        working += limits.max_num_seqs * spec.vocab_size * 4 * 4  # float32 logits, and what sampling makes of them
        return share - taken - working

    def _store_shape(self, num_pages: int) -> tuple[int, ...]:
        return self.attention.kv_shape(self.spec, num_pages, self.config.cache.page_size, self.group.size)


@contextmanager
def _memory_errors(dtype: str, available: int) -> Iterator[None]:
    """An allocation that fails while starting is a person's matter, not a traceback's."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"memory ran out while starting ({in_words(available)} was available): use a smaller model, "
            f"--dtype bfloat16 where it is {dtype}, or a smaller --kv-cache-memory-bytes"
        ) from error


def _weights_too_large(needed: int, dtype: str, available: int) -> str:
    half = "--dtype bfloat16 (half of it), " if dtype == "float32" and needed // 2 <= available else ""
    return f"the weights take {in_words(needed)} as {dtype} and {in_words(available)} is available: use {half}a smaller model or more memory"
