"""The engine process of `benchmarks.front`: the real one, sockets, driver and scheduler, over an executor without a model.
The supervisor starts it in place of octavo.engine.process. A step takes OCTAVO_FRONT_STEP_MS; there are
OCTAVO_FRONT_PAGES pages, or enough for all requests."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable

from octavo.config import Config
from octavo.engine import build, process
from octavo.executor.base import Executor
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.weights.sources.source import ModelSource

STEP_MS, PAGES = "OCTAVO_FRONT_STEP_MS", "OCTAVO_FRONT_PAGES"
VOCAB_SIZE, MAX_MODEL_LEN, PAGE_SIZE = 30_000, 4096, 16


class TimedSteps:
    """An executor whose device is a clock: a step starts when the one before it ends, and its tokens are made up."""

    overlap = True

    def __init__(self, num_rows: int, step_seconds: float) -> None:
        self._num_rows, self._step_seconds = num_rows, step_seconds
        self._in_flight: deque[tuple[float, StepResult]] = deque()
        self._free_at = 0.0  # when the device finishes all submitted work

    def start(self) -> EngineReport:
        return EngineReport(
            device="a clock",
            dtype="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self._num_rows,
            max_num_batched_tokens=8192,
            page_size=PAGE_SIZE,
            num_pages=int(os.environ.get(PAGES, self._num_rows * (MAX_MODEL_LEN // PAGE_SIZE))),
            num_host_pages=0,
            weights_bytes=0,
            page_bytes=1,
        )

    def submit(self, plan: StepPlan) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + self._step_seconds
        # Different tokens at every step, of different lengths, as a model's would be.
        tokens = [1000 + (plan.step * 7919 + at * 104_729) % (VOCAB_SIZE - 1000) for at in range(sum(plan.samples))]
        self._in_flight.append((self._free_at, StepResult(plan.step, tokens)))

    def collect(self) -> StepResult:
        ends_at, result = self._in_flight.popleft()
        if (wait := ends_at - time.monotonic()) > 0:
            time.sleep(wait)
        return result

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


def load_executor(config: Config, source: ModelSource) -> Executor:
    rows = config.scheduler.max_num_seqs
    assert isinstance(rows, int), "benchmarks.front says how many"
    return TimedSteps(rows, float(os.environ[STEP_MS]) / 1000)


if __name__ == "__main__":
    build.load_executor = load_executor
    os.sched_setaffinity = lambda pid, cores: None  # a clock needs no cores of its own: replicas would be tied to them
    sys.exit(process.main())
