"""Chips that are not here: step times from their bandwidth, arithmetic and memory, with the efficiency of a machine that was measured.
All of it is an estimate, and is labelled so."""

import difflib
import re
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.plan.model_shape import ModelShape, in_gigabytes
from octavo.plan.step_model import StepModel


class Chip(NamedTuple):
    """Peaks as the maker states them, without sparsity."""

    name: str
    bandwidth: float  # bytes a second
    flops: float  # of 16-bit products; on a CPU: of 8-bit products
    memory: float  # bytes; 0: not known
    link: float = 0.0  # bytes a second to its neighbours, one way; 0: a machine of its own
    flops_8bit: float = 0.0  # 0: as 16-bit products

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")


G, T, GiB = 1e9, 1e12, 2.0**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", 3350 * G, 989 * T, 80 * GiB, 450 * G, 1979 * T),
        Chip("h200", 4800 * G, 989 * T, 141 * G, 450 * G, 1979 * T),
        Chip("a100", 2039 * G, 312 * T, 80 * GiB, 300 * G),
        Chip("l4", 300 * G, 121 * T, 24 * GiB, 32 * G, 242 * T),
        Chip("l40s", 864 * G, 362 * T, 48 * GiB, 32 * G, 733 * T),
        Chip("rtx4090", 1008 * G, 165 * T, 24 * GiB, 32 * G, 330 * T),
        Chip("mi300x", 5300 * G, 1307 * T, 192 * GiB, 448 * G, 2614 * T),
    )
}
_CPU = re.compile(r"cpu:(\d{1,4})x(\d{1,2})(?::(\d{1,6})g)?")
_CHANNEL = 38.4 * G  # DDR5-4800
_CORE_OPS = 515e9  # 8-bit products a second of a core with VNNI, measured on two cores (benchmarks/cpu.md)
_CPU_MEMORY = 64 * GiB


class Efficiency(NamedTuple):
    """Shares of the peaks that were reached, by the number of tokens in a step."""

    source: str
    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    context: float  # of the bandwidth, in attention of rows with one token
    pair: float  # of the arithmetic, in attention of prompts
    step: float  # seconds that a step takes besides
    row: float  # seconds for each row: sampling


# Llama-3.1-8B in bf16 (benchmarks/gpu.md): a stream of 251 tokens/s, 23,400 tokens/s with 256 rows, prompts at 42,400 tokens/s.
GPU = Efficiency(
    "Octavo on one H200, Llama-3.1-8B", (1, 64, 256, 1024, 8192), (0.86, 0.82, 0.66, 0.68, 0.69), 0.88, 0.4, 1e-4, 2e-6
)
# SmolLM2-135M, packed weights, two cores with AVX-512 VNNI (benchmarks/cpu.md).
CPU = Efficiency(
    "Octavo on 2 cores, SmolLM2-135M", (1, 8, 32, 128, 512), (0.4, 0.45, 0.5, 0.6, 0.7), 0.3, 0.1, 1e-3, 2e-4
)
_REDUCE_SECONDS = 12e-6  # the least that a reduction over ranks takes
_WORKING = 0.04  # share of a GPU's memory that steps and graphs need


def chip_of(name: str) -> Chip:
    """Raises ConfigError for a chip that is not known."""
    plain = name.strip().lower().replace(" ", "").replace("-", "").replace("_", "")
    if found := _CPU.fullmatch(plain):
        cores, channels = int(found[1]), int(found[2])
        if cores and channels:
            memory = int(found[3]) * GiB if found[3] else _CPU_MEMORY
            return Chip(plain, channels * _CHANNEL, cores * _CORE_OPS, memory)
    for prefix in ("nvidia", "amd", "geforce"):
        plain = plain.removeprefix(prefix)
    if plain in CHIPS:
        return CHIPS[plain]
    close = difflib.get_close_matches(plain, CHIPS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"--chip {name}: it is not known{hint} Known are {', '.join(CHIPS)}, and cpu:CORESxCHANNELS such as cpu:16x8, or cpu:16x8:256g "
        "with its memory; or measure the machine with octavo plan --measure"
        if hint
        else f"--chip {name}: it is not known. Known are {', '.join(CHIPS)}, and cpu:CORESxCHANNELS such as cpu:16x8, or cpu:16x8:256g with its "
        "memory; or measure the machine with octavo plan --measure"
    )


class Estimate(NamedTuple):
    model: StepModel
    weights_bytes: int  # on each chip
    num_pages: int
    page_bytes: int  # on each chip
    note: str


def ideal_seconds(chip: Chip, shape: ModelShape, weights_bytes: int, num_tokens: int, is_8bit: bool = False) -> float:
    """Products of so many tokens, at the chip's peaks."""
    flops = (chip.flops_8bit or chip.flops) if is_8bit else chip.flops
    return max(shape.bytes_read(num_tokens, weights_bytes) / chip.bandwidth, num_tokens * shape.token_flops / flops)


def estimate(
    chip: Chip,
    shape: ModelShape,
    *,
    weights_bytes: int,
    kv_bytes: float,
    page_size: int,
    ranks: int = 1,
    utilization: float = 0.92,
    is_8bit: bool = False,
) -> Estimate:
    """Step times and pages of a replica on `ranks` of these chips. `kv_bytes`: of a number in a KV page. Raises ConfigError where
    the model does not fit."""
    how = CPU if chip.is_cpu else GPU
    own_bytes = weights_bytes // ranks
    page_bytes = max(1, round(shape.kv_numbers * kv_bytes * page_size / ranks))
    share = 0.4 if chip.is_cpu else utilization - _WORKING
    room = (chip.memory - own_bytes) * share if chip.is_cpu else chip.memory * share - own_bytes
    num_pages = int(room // page_bytes)
    if num_pages < 2:
        least = next(
            (n for n in (1, 2, 4, 8, 16, 32, 64) if chip.memory * share > weights_bytes / n + 2 * page_bytes), 0
        )
        way = f"use --tensor-parallel-size {least}" if least > ranks else "use a larger chip, or --quantization int4"
        raise ConfigError(
            f"the model does not fit: its weights take {in_gigabytes(own_bytes)} on each of {ranks} {chip.name} with "
            f"{in_gigabytes(chip.memory)}: {way}"
        )
    tokens = sorted({*how.tokens, 2, 4, 8, 16, 32, 128, 512, 2048})
    seconds, floor = [], 0.0
    for count in tokens:
        ideal = ideal_seconds(chip, shape, weights_bytes, count, is_8bit) / ranks
        reduce = 0.0
        if ranks > 1:
            moved = 2 * (ranks - 1) / ranks * count * shape.hidden_size * 2 / (chip.link or 10 * G)
            reduce = 2 * shape.num_layers * (_REDUCE_SECONDS + moved)
        floor = max(floor, how.step + ideal / _share(how, count) + reduce)
        seconds.append(floor)
    context = shape.kv_numbers * kv_bytes / ranks / chip.bandwidth / how.context
    pair = shape.pair_flops / ranks / chip.flops / how.pair
    note = f"estimated from the peaks of {chip.name} with the efficiency of {how.source}: not measured"
    return Estimate(StepModel(tokens, seconds, how.row, context, pair), own_bytes, num_pages, page_bytes, note)


def _share(how: Efficiency, num_tokens: int) -> float:
    low = max((at for at, tokens in enumerate(how.tokens) if tokens <= num_tokens), default=0)
    if low + 1 >= len(how.tokens):
        return how.shares[-1]
    part = (num_tokens - how.tokens[low]) / (how.tokens[low + 1] - how.tokens[low])
    return how.shares[low] + max(0.0, part) * (how.shares[low + 1] - how.shares[low])
