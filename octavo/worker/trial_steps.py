"""Trial steps, run before the first request to compile kernels, to measure memory, and to time a step of one row."""

import importlib
import time
from collections.abc import Callable

import numpy as np

from octavo.ipc.cores import usable_cores
from octavo.layers.mlp import warm_up_gates
from octavo.layers.moe import warm_up_experts
from octavo.limits import Limits
from octavo.messages import PoolingParams, SamplingParams
from octavo.schedule.step_costs import VERIFY_TOKENS
from octavo.spec import ModelSpec
from octavo.worker.draft_model import DraftModel
from octavo.worker.graphs import Graphs
from octavo.worker.memory.measure import DEMANDING, trial_columns
from octavo.worker.rows import NO_CHANGES
from octavo.worker.runner import Runner

_WARMUP_SIZES = (1, 2, 4, 8, 16, 32, 64)  # products with few rows use separate kernels

_WARMUP_PROMPT = 32  # tokens

_TIMED_STEPS = 3
_TIMED_VERIFICATIONS = 2
_TIMED_REPLAYS = 5


def most_tokens(limits: Limits) -> int:
    """The most tokens in a step: each row contributes at most one whole prompt."""
    return min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)


class TrialSteps:
    def __init__(self, runner: Runner, spec: ModelSpec, limits: Limits) -> None:
        self._runner, self._spec, self._limits = runner, spec, limits

    def run(self, num_tokens: int, num_rows: int, is_greedy: bool, prefix_len: int = 0) -> None:
        """Run one step. `is_greedy`: sample greedily. `prefix_len`: tokens that each row holds already."""
        rows = self._runner.rows
        for row in range(num_rows):
            rows.sampling.enter(row, SamplingParams(temperature=0.0) if is_greedy else DEMANDING, 0, 1, [])
        if self._spec.is_encoder:
            rows.pooling = dict.fromkeys(range(num_rows), PoolingParams("mean"))
        columns = trial_columns(num_tokens, num_rows)
        columns.lens += 0 if self._spec.is_encoder else prefix_len
        self._runner.compute(columns)
        for row in range(num_rows):  # clear the parameters, so that later steps do not pay for them
            rows.sampling.leave(row)

    def time_one_row(self) -> float:
        """Seconds of a step with one token of one row: the shortest of a few, because other programs only make steps longer. The first is
        not counted: it touches memory for the first time, or is captured."""
        if self._runner.graphs is not None:
            return self._time(lambda: self._replay(1), _TIMED_REPLAYS)
        return self._time(lambda: self.run(1, 1, is_greedy=True), _TIMED_STEPS)

    def time_verification(self) -> float:
        """Seconds of a step in which one row without a context verifies VERIFY_TOKENS − 1 drafted tokens."""
        if self._limits.max_model_len < VERIFY_TOKENS or self._limits.max_num_batched_tokens < VERIFY_TOKENS:
            return 0.0
        if self._runner.graphs is not None:
            return self._time(lambda: self._replay(VERIFY_TOKENS), _TIMED_REPLAYS)
        columns = trial_columns(VERIFY_TOKENS, 1)
        columns.num_drafted = np.array([VERIFY_TOKENS - 1])
        self._runner.rows.sampling.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
        seconds = self._time(lambda: self._runner.compute(columns), _TIMED_VERIFICATIONS)
        self._runner.rows.sampling.leave(0)
        return seconds

    def time_draft(self) -> float:
        """Seconds of a pass of the draft model with one token of one row; 0: there is none."""
        if (draft := self._runner.draft) is None:
            return 0.0
        self._runner.rows.sampling.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
        columns = trial_columns(1, 1)
        step: Callable[[], object] = lambda: draft.compute(columns)  # noqa: E731
        if draft.graphs is not None:
            step = lambda: draft.wait(draft.replay(columns))  # noqa: E731
        seconds = self._time(step, _TIMED_STEPS)
        self._runner.rows.sampling.leave(0)
        return seconds

    def _replay(self, num_tokens: int) -> None:
        """Run a captured step of the first tokens of one row."""
        graphs = self._runner.graphs
        assert graphs is not None
        graphs.run([0] * num_tokens, range(1, num_tokens + 1), NO_CHANGES, 0, is_greedy=True)
        self._runner.device.synchronize()

    def _time(self, step: Callable[[], object], num_steps: int) -> float:
        seconds = []
        for _ in range(num_steps + 1):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        self._runner.rows.tokens.zero_()
        return min(seconds[1:])

    def warm_up(self) -> None:
        """Compile the Triton kernels that first requests need, in parallel: one after the other takes several times as long."""
        limits, runner = self._limits, self._runner
        num_tokens = most_tokens(limits)
        num_rows = min(limits.max_num_seqs, num_tokens)
        chunk = max(1, min(32, limits.max_model_len // 2))
        with importlib.import_module("octavo.kernels.triton.runtime.warmup").warmup(usable_cores()):
            sizes = ((1, 1, 0), (num_rows, num_rows, 0), (num_tokens, num_rows, 0), (chunk, 1, chunk))
            for tokens, rows, prefix_len in sizes:
                self.run(tokens, rows, rows > 1, prefix_len)
                runner.rows.tokens.zero_()  # nothing was sampled: the stored values are no tokens
            warm_up_gates(runner.model, num_tokens)
            warm_up_experts(runner.model, num_tokens)
            if runner.adapters is not None:
                runner.adapters.warm_up()
            if runner.graphs is not None:
                runner.graphs.warm_up_adapters()
            for size in _WARMUP_SIZES:
                if runner.graphs is not None and size <= runner.graphs.max_rows:
                    runner.graphs.warm_up(size, is_shared=False)
                    runner.graphs.warm_up(size, is_shared=True)
        runner.rows.tokens.zero_()


def warm_up_draft(draft: DraftModel, graphs: Graphs, runner: Runner) -> None:
    """Compile the Triton kernels of a draft model's passes, in parallel, and those of the features in the model's steps."""
    rows = runner.rows
    rows.sampling.enter(0, SamplingParams(temperature=0.0), 0, 1, [])
    with importlib.import_module("octavo.kernels.triton.runtime.warmup").warmup(usable_cores()):
        draft.compute(trial_columns(min(_WARMUP_PROMPT, rows.width - 1), 1))
        for size in _WARMUP_SIZES[:4]:
            graphs.warm_up(size, is_shared=False)
        if runner.graphs is not None and runner.model.tap is not None:
            runner.graphs.warm_up(1, is_shared=False)
        warm_up_gates(draft.model, _WARMUP_SIZES[-1])
    rows.sampling.leave(0)
    rows.tokens.zero_()  # nothing was sampled
