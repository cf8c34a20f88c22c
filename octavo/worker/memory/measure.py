"""Measure what a rank holds on its GPU and what its steps take, by running steps of the largest size before pages exist.
page_count.py turns the bytes into a number of pages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from octavo.device import Device
from octavo.errors import ConfigError
from octavo.messages import MAX_LOGPROBS, DeviceMemory, SamplingParams
from octavo.worker.assemble import Columns
from octavo.worker.memory.page_count import MiB, in_words

RunStep = Callable[[int, int, bool], object]
"""(tokens, rows, is_greedy): compute that many tokens of that many rows against a KV store of a page or two, and sample for
every row: greedily as in a CUDA graph if is_greedy, otherwise with the most expensive parameters (DEMANDING)."""

DEMANDING = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logprobs=MAX_LOGPROBS,
)
"""The parameters with which sampling takes the most memory."""

# A CUDA context with its loaded kernels. Most containers hide the driver's count of a process's memory, so memory outside
# the allocator is attributed to this process up to this size, and to other processes beyond it.
_CONTEXT_BYTES = 768 * MiB

_SAFETY_BYTES = 256 * MiB  # for stores rounded up to 2 MiB, kernels loaded later, small growth of other processes
_GRAPH_BYTES = 4 * MiB  # driver memory for one captured graph of some hundred launches


def measure(
    device: Device,
    run_step: RunStep,
    num_tokens: int,
    num_rows: int,
    *,
    num_graphs: int = 0,
    num_pools: int = 1,
    staging_bytes: int = 0,
    is_alone: bool = True,
) -> DeviceMemory:
    """Measure with the weights loaded and the tables allocated. ConfigError if a step of `num_tokens` does not fit; that
    many tokens must fit into `num_rows` rows.

    `num_pools`: of memory for graphs; those of a draft model need no more than the model's. `staging_bytes`: what will be allocated besides pages once their number is known. `is_alone`: no other rank takes part
    in the steps. Several ranks must all run the same steps, so no rank tries smaller ones by itself."""
    num_rows = min(num_rows, num_tokens)
    least = working_bytes(device, partial(run_step, 1, 1, False))
    greedy = working_bytes(device, partial(run_step, num_rows, num_rows, True)) if num_graphs else 0
    rows = working_bytes(device, partial(run_step, num_rows, num_rows, False))
    working = working_bytes(device, partial(run_step, num_tokens, num_rows, False))
    if least is None or greedy is None or rows is None or working is None:
        raise ConfigError(_no_room(device, run_step if is_alone else None, num_tokens, num_rows))
    # Graphs have their own memory pool, and each runs once uncaptured on its own stream: twice a step's memory.
    reserve = _SAFETY_BYTES + staging_bytes + num_graphs * _GRAPH_BYTES + num_pools * 2 * greedy
    use = device.memory_use()
    outside = use.total - use.free - use.reserved
    context = min(outside, _CONTEXT_BYTES)
    return DeviceMemory(
        total=use.total,
        other=outside - context,
        own=use.reserved + context,
        working=max(working, rows),
        working_rows=rows,
        working_least=min(least, rows),
        reserve=reserve,
    )


def working_bytes(device: Device, run: Callable[[], object]) -> int | None:
    """Peak bytes during `run` beyond what is still held after it; None: it does not fit.

    Counts what the allocator reserves, including gaps that it cannot use. Memory that stays allocated (a library's
    workspace, loaded kernels) is not counted: later readings of the device include it."""
    device.memory_use()  # this also releases the allocator's cached memory
    device.start_peak()
    try:
        run()
        peak = device.peak_reserved()
    except torch.OutOfMemoryError:
        return None
    return max(0, peak - device.memory_use().reserved)


@contextmanager
def memory_errors(dtype: str, available: int) -> Iterator[None]:
    """Turn an allocation failure during the start into a ConfigError that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"memory ran out while starting ({in_words(available)} was available): use a smaller model, "
            f"--dtype bfloat16 where it is {dtype}, or a smaller --kv-cache-memory-bytes"
        ) from error


def trial_columns(num_tokens: int, num_rows: int) -> Columns:
    """A step of `num_tokens` tokens spread evenly over `num_rows` rows; each row starts its prompt and samples."""
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int64)
    counts[: num_tokens % num_rows] += 1
    counts = counts[counts > 0]
    return Columns(np.arange(len(counts)), counts, counts.copy(), np.ones(len(counts), dtype=np.bool_))


def _no_room(device: Device, run_step: RunStep | None, num_tokens: int, num_rows: int) -> str:
    """Why a step does not fit, and the largest size that does, found by running it."""
    free = device.memory_use().free
    why = (
        f"a step of {num_tokens} tokens takes more than the {in_words(free)} that the weights and other processes leave"
    )
    if run_step is None:
        return f"{why}: lower --max-num-batched-tokens, or use a smaller model"
    tokens, rows = num_tokens // 2, num_rows
    while tokens:
        rows = min(rows, tokens)
        working = working_bytes(device, partial(run_step, tokens, rows, False))
        # Leave as much again for pages and graphs, without which the step is useless.
        if working is not None and 2 * working + _SAFETY_BYTES <= device.memory_use().free:
            fewer_rows = f" --max-num-seqs {rows}" if rows < num_rows else ""
            return f"{why}: use --max-num-batched-tokens {tokens}{fewer_rows}"
        tokens //= 2
    return f"{why}, and so does one of a single token: use a smaller model, or free the GPU of other processes"
