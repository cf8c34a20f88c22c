"""What a rank's GPU holds and what its steps take, measured by running steps of the largest size before there are pages.
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
"""(tokens, rows, is_plain): compute that many tokens of so many rows against a KV store of a page or two, and sample for
every row; is_plain: greedily, as a CUDA graph would, else by all that a request may ask for (DEMANDING)."""

DEMANDING = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logprobs=MAX_LOGPROBS,
)
"""What makes sampling take the most memory."""

# A CUDA context with its loaded kernels. The driver's own count of a process's memory is not to be had inside most
# containers, so what is taken outside the allocator is put down to this process up to here, and to others beyond.
_CONTEXT_BYTES = 768 * MiB

_SAFETY_BYTES = 256 * MiB  # stores rounded up to 2 MiB, kernels loaded later, other processes that grow a little
_GRAPH_BYTES = 4 * MiB  # what the driver keeps for one captured graph of some hundred launches


def measure(
    device: Device,
    run_step: RunStep,
    num_tokens: int,
    num_rows: int,
    *,
    num_graphs: int = 0,
    staging_bytes: int = 0,
    is_alone: bool = True,
) -> DeviceMemory:
    """With the weights loaded and the tables allocated. ConfigError where a step of `num_tokens` does not fit; that many
    must fit into `num_rows` rows.

    `staging_bytes`: what will be taken besides pages once their number is known. `is_alone`: no other rank takes part in
    the steps; with others, all of them must run the same ones, so no rank tries smaller ones by itself."""
    num_rows = min(num_rows, num_tokens)
    least = working_bytes(device, partial(run_step, 1, 1, False))
    plain = working_bytes(device, partial(run_step, num_rows, num_rows, True)) if num_graphs else 0
    rows = working_bytes(device, partial(run_step, num_rows, num_rows, False))
    working = working_bytes(device, partial(run_step, num_tokens, num_rows, False))
    if least is None or plain is None or rows is None or working is None:
        raise ConfigError(_no_room(device, run_step if is_alone else None, num_tokens, num_rows))
    # Graphs keep their tensors in a pool of their own, and each is rehearsed once on a stream of its own: twice a step.
    reserve = _SAFETY_BYTES + staging_bytes + num_graphs * _GRAPH_BYTES + 2 * plain
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
    """What `run` takes while it runs, beyond what is held after it; None: it does not fit.

    Counted is what the allocator reserves, its unusable gaps included. What stays (a library's workspace, loaded kernels)
    is no working space: the next look at the device finds it taken."""
    device.memory_use()  # as clean as it gets: what lies cached from before is given back
    device.start_peak()
    try:
        run()
        peak = device.peak_reserved()
    except torch.OutOfMemoryError:
        return None
    return max(0, peak - device.memory_use().reserved)


@contextmanager
def memory_errors(dtype: str, available: int) -> Iterator[None]:
    """Turn an allocation that fails during the start into a ConfigError that says what to change."""
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
    """So many tokens, shared out evenly among the first rows, each a prompt from its beginning, each sampled for."""
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
        # As much again is left for pages and graphs: a step without them is of no use.
        if working is not None and 2 * working + _SAFETY_BYTES <= device.memory_use().free:
            fewer_rows = f" --max-num-seqs {rows}" if rows < num_rows else ""
            return f"{why}: use --max-num-batched-tokens {tokens}{fewer_rows}"
        tokens //= 2
    return f"{why}, and so does one of a single token: use a smaller model, or free the GPU of other processes"
