"""Timing on a GPU: graphs of many calls over cold copies, with kernels compiled beforehand.
Without a GPU everything runs once, small, in Triton's interpreter: a rehearsal."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

CEILING = 4.26e12  # bytes a second: an H200's copy and read speed in the same session as the other figures
COLD_BYTES = 130_000_000  # more than twice the L2 cache
START = time.monotonic()


def elapsed() -> float:
    return time.monotonic() - START


def microseconds(calls: list[Callable[[], object]], is_rehearsal: bool, replays: int = 5) -> float:
    """Return the median time of one call; all calls run one after the other in one CUDA graph."""
    if is_rehearsal:
        start = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - start) * 1e6
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def replayed(call: Callable[[], torch.Tensor], times: int) -> torch.Tensor:
    """Return the call's result after replaying it `times` times as a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(times):
        graph.replay()
    return out.clone()


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def share(num_bytes: float, time_us: float) -> float:
    """Return the per cent of the ceiling."""
    return num_bytes / (time_us * 1e-6) / CEILING * 100


def _compile_only(kernel: Any, grid: Any) -> Any:
    def compile_it(*args: Any, **kwargs: Any) -> None:
        # The launcher, a small C extension for each kind of arguments, is built here too.
        kernel.run(*args, grid=grid, warmup=True, **kwargs)._init_handles()

    return compile_it


def _start_worker() -> None:
    from triton.runtime.jit import KernelInterface

    KernelInterface.__getitem__ = _compile_only
    torch.set_grad_enabled(False)


def _run_job(job: Callable[[], object]) -> str:
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return ""


def compile_all(jobs: Iterable[Callable[[], object]], chunksize: int = 4) -> None:
    """Run the jobs' launches without launching, in separate processes: Triton's front end holds the interpreter lock.
    Must come before this process touches the GPU: the workers are forks of it."""
    jobs = list(jobs)
    workers = min(14, os.cpu_count() or 1)
    faults: dict[str, int] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_start_worker) as pool:
        for fault in pool.map(_run_job, jobs, chunksize=chunksize):
            if fault:
                faults[fault] = faults.get(fault, 0) + 1
    print(f"{elapsed():5.1f} s  {len(jobs)} variants compiled by {workers} processes", flush=True)
    for fault, count in faults.items():
        print(f"         {count} × {fault}")


def cold(tensor_of: Callable[[int], torch.Tensor], num_bytes: int, is_rehearsal: bool) -> list[torch.Tensor]:
    """Make enough copies that the caches hold none of them when its turn comes again; 40 at most."""
    return [tensor_of(index) for index in range(1 if is_rehearsal else min(40, max(2, -(-COLD_BYTES // num_bytes))))]


def at_least(calls: list[Callable[[], object]], number: int) -> list[Callable[[], object]]:
    return (calls * -(-number // len(calls)))[: max(number, len(calls))]
