"""The least time a load can take on a chip: bytes that must move and FLOPs that must be done, over measured ceilings.
It assumes only continuous batching with a given number of rows and tokens a step, and of a mixture of experts that every token
is sent to random ones, as a balanced model sends them: a step reads each expert that its tokens reach once.

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
    # The same for layers with an attention window; shared prefixes are not counted there.
    windowed_kv_tokens: int = 0
    windowed_attended: int = 0


@dataclass(frozen=True, slots=True)
class Chip:
    bandwidth: float  # bytes per second
    flops: float  # FLOP per second


@dataclass(frozen=True, slots=True)
class Experts:
    num_layers: int
    num_experts: int  # of a layer
    num_chosen: int  # of them, for each token
    parameters: int  # of one
    bytes_each: float  # per parameter

    def reached(self, num_tokens: int) -> float:
        """Expected number of a layer's experts that so many tokens reach, if each is sent to num_chosen random ones."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with grouped-query attention, as far as bytes and FLOPs go. The input embedding is only looked up."""

    layer_parameters: int  # of all layers together, without experts
    head_parameters: int
    layer_bytes: float  # per parameter
    head_bytes: float  # per parameter
    kv_bytes: float  # per token, over all layers
    attention_flops: int  # per (query, key) pair, over all layers
    experts: Experts | None = None
    window: int = 0  # of the layers that have one; 0: there are none
    windowed_share: float = 0.0  # of all layers

    @staticmethod
    def of(
        spec: ModelSpec,
        kv_bytes: float,
        layer_bytes: float = 2.0,
        head_bytes: float = 2.0,
        *,
        layer_parameters: int | None = None,
        experts: Experts | None = None,
    ) -> "Model":
        """`layer_parameters`: counted (`sizes`); None: those of a gated decoder without experts."""
        heads_width = spec.num_heads * spec.head_size
        if layer_parameters is None:
            attention = spec.hidden_size * (2 * heads_width + 2 * spec.num_kv_heads * spec.head_size)
            layer_parameters = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
        windows = [window for window in spec.windows if window]
        return Model(
            layer_parameters=layer_parameters,
            head_parameters=spec.hidden_size * spec.vocab_size,
            layer_bytes=layer_bytes,
            head_bytes=head_bytes,
            kv_bytes=kv_bytes,
            attention_flops=4 * spec.num_layers * heads_width,  # a product and a sum for QK, the same for PV
            experts=experts,
            # Where windows differ, the longest stands for all.
            window=max(windows, default=0),
            windowed_share=len(windows) / spec.num_layers,
        )


def step_seconds(work: Work, model: Model, chip: Chip, *, shared_once: bool = True) -> float:
    """Return the least time of one step. `shared_once`: a shared prefix is read once for all rows."""
    weights = model.layer_parameters * model.layer_bytes
    products: float = 2 * model.layer_parameters * work.num_tokens
    if model.experts is not None:
        experts = model.experts
        each = experts.num_layers * experts.parameters
        weights += each * experts.reached(work.num_tokens) * experts.bytes_each
        products += 2 * each * experts.num_chosen * work.num_tokens
    if work.num_samples:
        weights += model.head_parameters * model.head_bytes
        products += 2 * model.head_parameters * work.num_samples
    linear = max(weights / chip.bandwidth, products / chip.flops)
    attention = max(
        kv_tokens(work, model, shared_once=shared_once) * model.kv_bytes / chip.bandwidth,
        _mixed(model, work.attended, work.windowed_attended) * model.attention_flops / chip.flops,
    )
    return linear + attention


def kv_tokens(work: Work, model: Model, *, shared_once: bool) -> float:
    """Keys and values that a step reads or writes, as tokens of all layers."""
    return _mixed(model, work.kv_tokens - (work.shared_kv_tokens if shared_once else 0), work.windowed_kv_tokens)


def _mixed(model: Model, whole: float, windowed: float) -> float:
    share = model.windowed_share
    # A shared prefix may leave less than the window's tokens of every row.
    return (1 - share) * whole + share * min(whole, windowed)


def decode_work(num_rows: int, total_context: int, window: int = 0) -> Work:
    """One token for each row; contexts, the new tokens included, sum up to `total_context`. `window`: of a Model."""
    windowed = min(total_context, num_rows * window)
    return Work(num_rows, num_rows, total_context, 0, total_context, windowed, windowed)


def total_seconds(steps: Sequence[Work], model: Model, chip: Chip, *, shared_once: bool = True) -> float:
    return sum(step_seconds(work, model, chip, shared_once=shared_once) for work in steps)


def steps_of(items: Sequence[Item], max_rows: int, max_step_tokens: int, window: int = 0) -> Iterator[Work]:
    """Yield the steps of a load when all requests are submitted at once and served first come, first served. `window`: of a Model.

    The first request computes the shared prefix; the others find it in the cache."""
    waiting = list(reversed(items))
    running: list[_Row] = []
    while waiting or running:
        budget = max_step_tokens
        draft = _Draft(window)
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

    def __init__(self, window: int) -> None:
        self._window = window
        self.tokens = self.samples = self.kv = self.attended = 0
        self.windowed_kv = self.windowed_attended = 0
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
        if self._window:
            self.windowed_kv += min(end, count + self._window - 1)
            # Queries whose context is no longer than the window, then those that see a full one.
            short = max(0, min(end, self._window) - start)
            self.windowed_attended += short * start + short * (short + 1) // 2 + (count - short) * self._window
        if end == row.length:
            self.samples += 1
            row.length += 1
        if row.shared and start >= row.shared:
            self.num_sharing += 1
            self.shared_len = row.shared
        return count

    def work(self) -> Work:
        shared = max(0, self.num_sharing - 1) * self.shared_len
        return Work(self.tokens, self.samples, self.kv, shared, self.attended, self.windowed_kv, self.windowed_attended)
