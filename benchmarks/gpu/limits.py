"""The least time a load can take on a chip: bytes that must move and FLOPs that must be done, over measured ceilings.
It assumes only continuous batching with a given number of rows and tokens a step.

A step takes at least (its weights' bytes or its matrix products' FLOPs, whichever takes longer) plus (its keys' and values'
bytes or attention's FLOPs, whichever takes longer): layer by layer the two kinds of work wait for each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.gpu.workloads import Item
from octavo.spec import ModelSpec


class Work(NamedTuple):
    """The work of one step, in tokens."""

    num_tokens: int  # pass through the layers
    num_samples: int  # pass through the head
    kv_tokens: int  # keys and values read or written, counted for each row
    shared_kv_tokens: (
        int  # of those, the ones that other rows of the step also read: a kernel that shares prefixes reads them once
    )
    attended: int  # (query, key) pairs


@dataclass(frozen=True, slots=True)
class Chip:
    bandwidth: float  # bytes per second
    flops: float  # FLOP per second


@dataclass(frozen=True, slots=True)
class Model:
    """A gated decoder with grouped-query attention, as far as bytes and FLOPs go. The input embedding is only looked up."""

    layer_parameters: int  # of all layers together
    head_parameters: int
    layer_bytes: float  # per parameter
    head_bytes: float  # per parameter
    kv_bytes: float  # per token, over all layers
    attention_flops: int  # per (query, key) pair, over all layers

    @staticmethod
    def of(spec: ModelSpec, kv_bytes: float, layer_bytes: float = 2.0, head_bytes: float = 2.0) -> "Model":
        heads_width = spec.num_heads * spec.head_size
        attention = spec.hidden_size * (2 * heads_width + 2 * spec.num_kv_heads * spec.head_size)
        mlp = 3 * spec.hidden_size * spec.intermediate_size
        return Model(
            layer_parameters=spec.num_layers * (attention + mlp),
            head_parameters=spec.hidden_size * spec.vocab_size,
            layer_bytes=layer_bytes,
            head_bytes=head_bytes,
            kv_bytes=kv_bytes,
            attention_flops=4 * spec.num_layers * heads_width,  # a product and a sum for QK, the same for PV
        )


def step_seconds(work: Work, model: Model, chip: Chip, *, shared_once: bool = True) -> float:
    """Return the least time of one step. `shared_once`: a shared prefix is read once for all rows."""
    weights = model.layer_parameters * model.layer_bytes
    products = 2 * model.layer_parameters * work.num_tokens
    if work.num_samples:
        weights += model.head_parameters * model.head_bytes
        products += 2 * model.head_parameters * work.num_samples
    kv_tokens = work.kv_tokens - (work.shared_kv_tokens if shared_once else 0)
    linear = max(weights / chip.bandwidth, products / chip.flops)
    attention = max(kv_tokens * model.kv_bytes / chip.bandwidth, work.attended * model.attention_flops / chip.flops)
    return linear + attention


def decode_work(num_rows: int, total_context: int) -> Work:
    """One token for each row; contexts, the new tokens included, sum up to `total_context`."""
    return Work(num_rows, num_rows, total_context, 0, total_context)


def total_seconds(steps: Sequence[Work], model: Model, chip: Chip, *, shared_once: bool = True) -> float:
    return sum(step_seconds(work, model, chip, shared_once=shared_once) for work in steps)


def steps_of(items: Sequence[Item], max_rows: int, max_step_tokens: int) -> Iterator[Work]:
    """Yield the steps of a load when all requests are submitted at once and served first come, first served.

    The first request computes the shared prefix; the others find it in the cache."""
    waiting = list(reversed(items))
    running: list[_Row] = []
    while waiting or running:
        budget = max_step_tokens
        draft = _Draft()
        for row in running:
            budget -= draft.advance(row, budget)
        while waiting and budget and len(running) < max_rows:
            item = waiting.pop()
            is_first = len(waiting) == len(items) - 1
            row = _Row(len(item.prompt), item.output_len, 0 if is_first else item.shared_len, item.shared_len)
            running.append(row)
            budget -= draft.advance(row, budget)
        running = [row for row in running if row.length < row.end]
        yield draft.work()


class _Row:
    __slots__ = ("computed", "end", "length", "shared")

    def __init__(self, prompt_len: int, output_len: int, computed: int, shared: int) -> None:
        self.length, self.end = prompt_len, prompt_len + output_len
        self.computed = min(computed, prompt_len - 1)  # the last token is always computed: a token is sampled after it
        self.shared = shared


class _Draft:
    """A step being assembled."""

    def __init__(self) -> None:
        self.tokens = self.samples = self.kv = self.attended = 0
        self.num_sharing = self.shared_len = 0

    def advance(self, row: _Row, budget: int) -> int:
        start = row.computed
        count = min(row.length - start, budget)
        if not count:
            return 0
        end = row.computed = start + count
        self.tokens += count
        self.kv += end
        self.attended += count * start + count * (count + 1) // 2
        if end == row.length:
            self.samples += 1
            row.length += 1
        if row.shared and start >= row.shared:
            self.num_sharing += 1
            self.shared_len = row.shared
        return count

    def work(self) -> Work:
        shared = max(0, self.num_sharing - 1) * self.shared_len
        return Work(self.tokens, self.samples, self.kv, shared, self.attended)
