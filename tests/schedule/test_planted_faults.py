"""Faults planted in the scheduler, the cache and the pool, one at a time: the random workloads must catch every one.
`python -m tests.schedule.test_planted_faults` prints how fast."""

import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import octavo.cache.kv_cache
import octavo.cache.pool
import octavo.schedule.scheduler
from tests.schedule.workload import Workload

SCHEDULER, CACHE, POOL = octavo.schedule.scheduler, octavo.cache.kv_cache, octavo.cache.pool

FAULTS: dict[str, tuple[types.ModuleType, str, str]] = {
    "a choice skips the prompt's last token": (
        SCHEDULER,
        "follower.computed = follower.capacity = leader.prompt_len - 1",
        "follower.computed = follower.capacity = leader.prompt_len",
    ),
    "a choice starts in the step that writes its prompt": (
        SCHEDULER,
        "issued.forking.append(request)",
        "self._fork(request, draft)",
    ),
    "no copy on write": (
        CACHE,
        "shared = first < len(table) and self._is_shared(table[first])",
        "shared = False",
    ),
    "the whole prompt may be found in the cache": (
        CACHE,
        "(len(tokens) - 1) // self.page_size",
        "len(tokens) // self.page_size",
    ),
    "page keys do not depend on what came before": (CACHE, "blake2b(parent + content", "blake2b(content"),
    "matched pages that are idle count as free": (CACHE, "self.pool.num_free - idle", "self.pool.num_free"),
    "swap brings pages back in the wrong order": (
        CACHE,
        "return Transfer(table[: len(host)], host, list(table))",
        "return Transfer(table[: len(host)], host[::-1], list(table))",
    ),
    "host pages are not returned": (CACHE, "self.host_free += host\n", "\n"),
    "an evicted page can still be found": (POOL, "del self.index[key]", "pass"),
    "a page is given back twice as free": (
        POOL,
        "if self.refs[page] == 0:\n                if",
        "if self.refs[page] <= 1:\n                if",
    ),
    "a step of a former life publishes pages": (
        SCHEDULER,
        "if epoch == request.epoch and start + count",
        "if start + count",
    ),
    "a token in flight is fed back too early": (
        SCHEDULER,
        "samples = end == len(request.tokens) + request.pending",
        "samples = end == len(request.tokens)",
    ),
    "rows are not returned": (SCHEDULER, "self._free_rows.append(request.row)", "pass"),
    "the oldest request is thrown out": (SCHEDULER, "victim = self.running[-1]", "victim = self.running[0]"),
    "an aborted request keeps its pages": (
        SCHEDULER,
        "if request.is_swapped or request.sequence in self.cache.tables:",
        "if request.sequence in self.cache.tables:",
    ),
    "somebody enters in the step of a preemption": (
        SCHEDULER,
        "return budget if preemptions == self.num_preemptions else -1",
        "return budget",
    ),
    "what must be computed whole is cut": (SCHEDULER, "request.length if request.is_whole else 1", "1"),
    "what must be computed whole begins in the cache": (SCHEDULER, "reuse=not request.is_whole", "reuse=True"),
    "min_tokens is ignored": (SCHEDULER, " and len(request.tokens) >= request.min_len", ""),
}


def plant(fault: str) -> Callable[[int], Workload]:
    """A workload factory over copies of the modules, one of them with the fault in it."""
    faulty, right, wrong = FAULTS[fault]
    copies = {}
    for module in (POOL, CACHE, SCHEDULER):
        source = Path(module.__file__).read_text()
        if module is faulty:
            assert source.count(right) == 1, f"the line to spoil is gone or no longer unique: {right!r}"
            source = source.replace(right, wrong)
        copies[module] = types.ModuleType(module.__name__)
        exec(compile(source, module.__file__, "exec"), copies[module].__dict__)
    copies[CACHE].PagePool = copies[POOL].PagePool
    return lambda seed: Workload(seed, copies[SCHEDULER].Scheduler, copies[CACHE].KVCache)


def cases_until_caught(fault: str, limit: int) -> int | None:
    workload = plant(fault)
    for seed in range(limit):
        try:
            workload(seed).run()
        except Exception:
            return seed + 1
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault):
    assert cases_until_caught(fault, 3000) is not None


if __name__ == "__main__":
    for name in FAULTS:
        started = time.perf_counter()
        cases = cases_until_caught(name, 20_000)
        print(f"{name}: case {cases}, {time.perf_counter() - started:.2f} s")
