"""A rank's native CPU kernels: whether they can be used on this machine, and whole steps recorded as one call."""

import ctypes
from collections import Counter

import torch

from octavo.attention.native_cpu import step_of
from octavo.batch import Batch
from octavo.config import Config
from octavo.device import Device
from octavo.errors import ConfigError
from octavo.kernels.cpu.build import NoCompiler
from octavo.kernels.cpu.library import Kind, isa
from octavo.kernels.cpu.native import Native
from octavo.kernels.cpu.tape import NotRecordable, Tape
from octavo.layers.model import DecoderModel
from octavo.limits import Limits
from octavo.models.draft_heads.base import DraftHead
from octavo.weights.methods.cpu_native import NativeHeld, kind_name


def find_native(config: Config, limits: Limits, device: Device, rank: int) -> tuple[Native | None, str]:
    """Open the kernels if they can be used. → kernels, and a note for the start report ("": none)."""
    if device.is_cuda:
        return None, ""
    native, note = _open(limits, rank * limits.cpu_threads if config.parallel.cpu_pinning else -1)
    _require(config, native, note)
    return native, note


def _open(limits: Limits, first_cpu: int) -> tuple[Native | None, str]:
    if limits.dtype == "float16":
        return None, "no native CPU kernels: they hold weights in float32, bfloat16 or packed, not in float16"
    try:
        return Native(limits.cpu_threads, first_cpu), f"native CPU kernels ({isa()})"
    except NoCompiler as error:
        return None, f"no native CPU kernels, torch computes instead, which is several times slower: {error}"


def _require(config: Config, native: Native | None, note: str) -> None:
    """Refuse options that need native kernels when there are none."""
    if native is not None:
        return
    for flag, value in (
        ("--quantization", config.model.quantization),
        ("--kv-cache-dtype", config.cache.kv_cache_dtype),
    ):
        if value in ("int8", "int4", "float16"):
            why = f" ({note})" if note else ""
            raise ConfigError(f"{flag} {value} needs native CPU kernels, which cannot be used here{why}: leave it out")


def kinds_of(model: DecoderModel) -> Counter[Kind]:
    """Bytes of weights by the kind in which they are held."""
    return sum((held.bytes_of_kinds for held in model.held() if isinstance(held, NativeHeld)), Counter[Kind]())


def held(model: DecoderModel) -> str:
    """How the weights are held, as a note for the start report."""
    kinds = kinds_of(model)
    by_words: Counter[str] = Counter()
    for kind, num_bytes in kinds.items():
        by_words[kind_name(kind)] += num_bytes
    total = kinds.total()
    parts = [f"{num_bytes / total:.0%} in {words}" for words, num_bytes in by_words.most_common()]
    how = ""
    if any(kind.is_quantised for kind in kinds):
        how = "; products with packed ones take activations in 8 bits"
    if any(kind.is_decoded for kind in kinds):
        how = "; packed ones are decoded where they are used, and multiplied in float32"
    return f"weights: {', '.join(parts)}{how}"


_INPUTS = ("input_ids", "positions", "slots", "sample_at")


class CpuSteps:
    """The steps of a model, or of one stage of it, each in one native call: from token ids, or from the hidden states of the stage
    before, to logits, or to hidden states for the next stage."""

    def __init__(
        self,
        native: Native,
        tape: Tape,
        result: torch.Tensor,
        has_logits: bool,
        hidden: torch.Tensor | None,
        features: torch.Tensor | None = None,
    ) -> None:
        """`hidden`: where a step finds the hidden states of the stage before, or a head its features; None: it takes none. `features`: for a
        draft head."""
        self._native, self._tape = native, tape
        self._result = result  # [max S, V] or [max T, D]
        self._has_logits = has_logits
        self._hidden = hidden  # [max T, D]
        self._features = features  # of a model [max T, D], of a draft head [max S, D]

    def input(self, num_tokens: int) -> torch.Tensor:
        """[T, D]: to be filled before run(), unless this is the first stage."""
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def features(self, count: int) -> torch.Tensor:
        """What the last run made for a draft head: of each token or, by the head itself, of each sample."""
        assert self._features is not None
        return self._features[:count]

    def run(self, batch: Batch) -> torch.Tensor:
        """→ logits [S, V], or the hidden states [T, D] that the next stage needs; valid until the next run."""
        step = step_of(batch)
        self._native.set_on(step)
        self._tape.run(self._native.threads, step)
        return self._result[: step.num_samples if self._has_logits else step.num_tokens]

    def profile(self, batch: Batch, num_runs: int) -> list[tuple[str, float]]:
        """The operations in order, each with its average time in seconds."""
        seconds = (ctypes.c_double * self._tape.num_ops)()
        for _ in range(num_runs):
            self._tape.run(self._native.threads, step_of(batch), seconds)
        return [(name, took / num_runs) for name, took in zip(self._tape.names(), seconds, strict=True)]


def record(
    model: DecoderModel, native: Native, max_tokens: int, max_samples: int, num_groups: int = 1
) -> CpuSteps | str:
    """Record the model's steps. → the steps, or the reason why they cannot be recorded and must run operation by operation.
    `max_samples`: of a step, and no fewer than its rows. `num_groups`: groups of layers, each with its own page tables."""
    tape = Tape(max_tokens, max_samples)
    batch = _stand_in(tape, num_groups)
    inputs = {name: getattr(batch, name) for name in _INPUTS}
    stage = model.stage
    try:
        with native.recording(tape, inputs, num_groups):
            takes_hidden = model.takes_hidden or not stage.is_first
            hidden = tape.input(model.hidden_size) if takes_hidden else None
            result = model.forward(batch, hidden)
            features = None if model.tap is None else model.tap.features
            if stage.is_last:
                sampled = native.gather(result, batch.sample_at)
                result = model.logits(sampled)
                features = model.chained(sampled) if isinstance(model, DraftHead) else features
    except NotRecordable as error:
        return str(error)
    results = [result] if features is None else [result, features]
    found = tape.finish(results, [] if hidden is None else [hidden])
    return CpuSteps(
        native,
        tape,
        found[0],
        stage.is_last,
        None if hidden is None else found[-1],
        None if features is None else found[1],
    )


def _stand_in(tape: Tape, num_groups: int) -> Batch:
    """A batch of the largest size, to record with. Its values are never read."""
    longs = [torch.zeros(tape.max_tokens, dtype=torch.int64) for _ in range(2)]
    slots = torch.zeros(num_groups, tape.max_tokens, dtype=torch.int64)
    ints = [torch.zeros(size, dtype=torch.int32) for size in (tape.max_samples + 1, tape.max_samples)]
    page_tables = torch.zeros(num_groups, tape.max_samples, 1, dtype=torch.int32)
    batch = Batch(
        input_ids=longs[0],
        positions=longs[1],
        slots=slots[0],
        query_start=ints[0],
        seq_lens=ints[1],
        page_table=page_tables[0],
        sample_at=torch.zeros(tape.max_samples, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=1,
        num_decodes=0,
        query_lens_host=[],
        seq_lens_host=[],
    )
    return batch if num_groups == 1 else batch.in_groups(slots, page_tables)
