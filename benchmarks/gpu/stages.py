"""Where a run of shared_prefix spends its time: on the host before the GPU has work, in the first plans, or in decode steps. After every run a
fixed piece of Python is timed: a virtual core may be half as fast in one minute as in the next, and then so is all that is done before."""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.gpu import workloads
from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import Subject

LOAD = "shared_prefix"
_PIECE = 2_000_000  # additions
_TITLES = ("ms of", "tokens/s", "all", "before plans", "first plan", "its launch", "second plan", "its launch", "2 results at", "later step", "garbage", "Python piece")  # fmt: skip


class Timed:
    """While entered, keeps when each call of some methods began and ended."""

    def __init__(self, **methods: tuple[Any, str]) -> None:
        self._methods = methods
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def __enter__(self) -> "Timed":
        for stage, (owner, name) in self._methods.items():
            setattr(owner, name, self._timing(getattr(owner, name), self.spans[stage]))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for owner, name in self._methods.values():
            delattr(owner, name)  # the class's own again

    def _timing(self, method: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            spans.append((began, time.perf_counter()))
            return result

        return call


def run(subject: Subject, seeds: Sequence[int], scale: float, results: Results) -> int:
    """Returns how many runs failed: none."""
    subject.generate(workloads.make(LOAD, 99, scale))
    figures = {str(seed): _measure(subject, seed, scale) for seed in seeds}
    results.put("stages", figures)
    rows = [
        [f"seed {seed}", f"{its['rate']:,.0f}", *(f"{ms:.1f}" for ms in its["ms"])] for seed, its in figures.items()
    ]
    print("\n" + table(_TITLES, rows))
    return 0


def _measure(subject: Subject, seed: int, scale: float) -> dict[str, Any]:
    loop = subject.llm._loop
    items = workloads.make(LOAD, seed, scale)
    collected: list[float] = []

    def look(phase: str, _info: dict[str, int]) -> None:
        collected.append(time.perf_counter() if phase == "stop" else -time.perf_counter())

    gc.callbacks.append(look)
    try:
        with Timed(
            plan=(loop.scheduler, "plan"), submit=(loop.executor, "submit"), collect=(loop.executor, "collect")
        ) as timed:
            seconds = subject.generate(items)
            ended = time.perf_counter()
    finally:
        gc.callbacks.remove(look)
    began = ended - seconds
    first = [span for pair in zip(timed.spans["plan"], timed.spans["submit"], strict=False) for span in pair][:4]
    results = [end for _, end in timed.spans["collect"]]
    steps = [later - earlier for earlier, later in pairwise(results[1:])]
    parts = [
        seconds,
        first[0][0] - began,
        *(end - start for start, end in first),
        *[0.0] * (4 - len(first)),  # a load of one step
        results[min(1, len(results) - 1)] - began,
        statistics.median(steps) if steps else 0.0,
        sum(collected),
        _piece(),
    ]
    return {
        "rate": sum(item.output_len for item in items) / seconds,
        "titles": _TITLES[2:],
        "ms": [1e3 * part for part in parts],
        "steps": len(results),
    }


def _piece() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(_PIECE):
        total += number
    return time.perf_counter() - began
