"""The engine in this process, beside this machine's own measured limits: bytes read and dot products done in a second.
Measuring the limits needs the native kernels: it uses the same threads."""

import os
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.cpu.targets import OCTAVO, OCTAVO_FLOAT32
from benchmarks.gpu.limits import Chip, Model
from benchmarks.gpu.subject import NO_DRAFTS, Subject, spec_of
from octavo import LLM
from octavo.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {OCTAVO: {}, OCTAVO_FLOAT32: {"dtype": "float32"}}
"""LLM's options for each of Octavo's servers."""

_READ_BYTES = 256 * 2**20
_TRIES = 7
_PRODUCTS_RATIO = 4  # a dot instruction does 64 8-bit products, a float32 one 16


class Ceilings(NamedTuple):
    """Rates of all threads together when they do nothing else. `bandwidth`: over the requested number of bytes."""

    bandwidth: float  # bytes per second
    int8_rate: float  # operations per second, two for a product and its sum
    num_threads: int

    @property
    def float32_rate(self) -> float:
        return self.int8_rate / _PRODUCTS_RATIO


def ceilings(num_bytes: int = _READ_BYTES) -> Ceilings:
    from octavo.kernels.cpu import library
    from octavo.kernels.cpu.build import NoCompiler

    num_threads = len(os.sched_getaffinity(0))
    try:
        threads = library.Threads(num_threads)
    except NoCompiler as error:
        raise ConfigError(f"the machine's limits are measured with the native kernels: {error}") from error
    try:
        memory = library.aligned(num_bytes)
        memory.fill_(1)
        rates = []
        for _ in range(_TRIES):
            start = time.perf_counter()
            library.read_all(threads, memory)
            rates.append(num_bytes / (time.perf_counter() - start))
        dots = [library.dot_rate(threads) for _ in range(_TRIES)]
    finally:
        threads.close()
    return Ceilings(statistics.median(rates), statistics.median(dots), num_threads)


class Measured(Subject):
    """As on a GPU, but the engine reports the bytes of its weights, and the chip is this machine."""

    def __init__(self, model: str, name: str, **options: Any) -> None:
        self.options = {"model": model, "speculative_config": NO_DRAFTS, **options, **OPTIONS[name]}
        started = time.perf_counter()
        self.llm = LLM(**self.options)
        self.start_seconds = time.perf_counter() - started
        self.report = self.llm.report
        counted = Model.of(spec_of(model), 0)
        # A separate embedding matrix makes this average too large: the engine's bytes include it, the counted parameters do not.
        each = self.report.weights_bytes / (counted.layer_parameters + counted.head_parameters)
        self.model = Model.of(spec_of(model), self.report.page_bytes / self.report.page_size, each, each)
        self.ceilings = ceilings(min(_READ_BYTES, max(2**21, self.report.weights_bytes)))
        rate = self.ceilings.float32_rate if name == OCTAVO_FLOAT32 else self.ceilings.int8_rate
        self.chip = Chip(self.ceilings.bandwidth, rate)

    def machine(self) -> str:
        found = self.ceilings
        return (
            f"{found.num_threads} threads alone: {found.bandwidth / 1e9:.1f} GB/s read, {found.int8_rate / 1e9:,.0f} GOP/s of "
            f"8-bit dot products, {found.float32_rate / 1e9:,.0f} GFLOP/s of float32 (a quarter)"
        )
