"""Measuring: what is ours, what is others', what a step takes and what stays, and steps that do not fit."""

import re

import numpy as np
import pytest
import torch

from octavo.device import Device, MemoryUse
from octavo.errors import ConfigError
from octavo.worker.assemble import assemble
from octavo.worker.memory.measure import measure, trial_columns, working_bytes
from octavo.worker.memory.page_count import GiB, MiB
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging


class SmallGPU(Device):
    """80 GiB, a context of 600 MiB, other processes, and a model whose steps take so much per token and row."""

    def __init__(self, weights: int, other: int = 0, per_token: int = MiB, per_row: int = 8 * MiB) -> None:
        super().__init__("cpu")
        self.reserved, self.outside = weights, 600 * MiB + other
        self.per_token, self.per_row = per_token, per_row
        self.peak = 0
        self.largest = (0, 0)

    def memory_use(self) -> MemoryUse:
        return MemoryUse(80 * GiB, 80 * GiB - self.reserved - self.outside, self.reserved)

    def start_peak(self) -> None:
        self.peak = self.reserved

    def peak_reserved(self) -> int:
        return self.peak

    def run_step(self, num_tokens: int, num_rows: int, is_greedy: bool) -> None:
        if self.largest == (0, 0):
            self.reserved += 32 * MiB  # the first product's workspace stays
            self.outside += 50 * MiB  # and so do loaded kernels
        working = max(num_tokens * self.per_token, num_rows * (self.per_row // 4 if is_greedy else self.per_row))
        if working > self.memory_use().free:
            raise torch.OutOfMemoryError("no")
        self.peak = max(self.peak, self.reserved + working)
        self.largest = max(self.largest, (num_tokens, num_rows))


def test_every_byte_is_accounted_for() -> None:
    gpu = SmallGPU(16 * GiB)
    memory = measure(gpu, gpu.run_step, 8192, 512, num_graphs=10, staging_bytes=128 * MiB)
    assert gpu.largest == (8192, 512)
    assert (memory.total, memory.other) == (80 * GiB, 0)
    assert memory.own == 16 * GiB + (600 + 32 + 50) * MiB, "what stays after a step is held, not worked with"
    assert (memory.working, memory.working_rows, memory.working_least) == (8 * GiB, 4 * GiB, 8 * MiB)
    assert memory.reserve == (256 + 128 + 10 * 4) * MiB + 2 * GiB
    assert memory.for_pages == gpu.memory_use().free - memory.working - memory.reserve


def test_other_processes_are_recognised_and_graphs_are_counted_only_where_there_are_some() -> None:
    gpu = SmallGPU(16 * GiB, other=20 * GiB)
    memory = measure(gpu, gpu.run_step, 8192, 512)
    assert abs(memory.other - 20 * GiB) < 256 * MiB, "but for what a context may take"
    assert memory.reserve == 256 * MiB
    assert memory.for_pages == gpu.memory_use().free - memory.working - memory.reserve


def test_what_stays_is_no_working_space_and_what_does_not_fit_is_said() -> None:
    gpu = SmallGPU(0)
    assert working_bytes(gpu, lambda: gpu.run_step(1000, 1, False)) == 1000 * MiB
    assert working_bytes(gpu, lambda: gpu.run_step(1000, 1, False)) == 1000 * MiB
    assert working_bytes(gpu, lambda: gpu.run_step(100_000, 1, False)) is None


def test_a_step_that_does_not_fit_is_refused_with_one_that_does() -> None:
    gpu = SmallGPU(76 * GiB)
    with pytest.raises(ConfigError, match=r"a step of 8192 tokens takes more than the 3.3 GiB") as caught:
        measure(gpu, gpu.run_step, 8192, 64)
    (fits,) = re.findall(r"use --max-num-batched-tokens (\d+)$", caught.value.message)
    assert int(fits) == 1024 and measure(gpu, gpu.run_step, int(fits), 64).for_pages > GiB
    with pytest.raises(ConfigError) as caught:
        measure(gpu, gpu.run_step, 8192, 512)
    ((fits, rows),) = re.findall(r"use --max-num-batched-tokens (\d+) --max-num-seqs (\d+)$", caught.value.message)
    assert measure(gpu, gpu.run_step, int(fits), int(rows)).for_pages > GiB
    gpu.largest = (0, 0)
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens"):
        measure(gpu, gpu.run_step, 8192, 64, is_alone=False)
    assert gpu.largest == (64, 64), "with other ranks, none tries steps that the others do not"
    full = SmallGPU(79 * GiB + 128 * MiB)
    with pytest.raises(ConfigError, match="use a smaller model"):
        measure(full, full.run_step, 8192, 64)


def test_fewer_tokens_than_rows() -> None:
    gpu = SmallGPU(GiB)
    assert measure(gpu, gpu.run_step, 16, 512).working == 128 * MiB


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (20, 4), (23, 4), (4, 4), (3, 5)])
def test_a_trial_step_can_be_assembled_and_is_as_large_as_asked(num_tokens: int, num_rows: int) -> None:
    device = Device("cpu")
    staging = Staging(device)
    columns = trial_columns(num_tokens, num_rows)
    batch = assemble(columns, RowState(5, 8, 4, 100, device, staging), staging).batch
    assert batch.num_tokens == num_tokens and batch.num_rows == min(num_tokens, num_rows) == len(batch.sample_at)
    assert np.ptp(columns.counts) <= 1 and int(batch.slots.max()) < 4, "all in the first page"
