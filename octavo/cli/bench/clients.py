"""Client processes of `octavo bench serve`: splits a workload over several processes, sends it, and merges the results."""

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from octavo.cli.bench.sending import RequestResult, Sender, client_for, drive, loop_factory
from octavo.cli.bench.workload import Workload
from octavo.config import AUTO
from octavo.errors import RequestFailed
from octavo.ipc.cores import usable_cores

CORES_EACH = 4  # cores per client process: the server needs the others
STREAMS_EACH = 32  # streams per client process: with fewer, another process gains nothing
MAX_AUTO = 8
START_LIMIT_S = 120.0  # a process that has not started by then has failed


@dataclass(frozen=True, slots=True)
class RunResult:
    results: list[RequestResult]  # in the order of the workload
    cpu_seconds: list[float]  # CPU time of each process while it sent and received

    @property
    def busiest(self) -> float:
        """Largest CPU share of a client process during the run: near 1, the client itself was the bottleneck."""
        seconds = max(r.ended for r in self.results) - min(r.started for r in self.results)
        return min(1.0, max(self.cpu_seconds) / seconds) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of the workload that one process sends."""

    arguments: argparse.Namespace
    model: str
    load: Workload
    max_concurrency: int | None


def num_processes(wanted: int | str, num_streams: int, num_cores: int | None = None) -> int:
    """Number of client processes. `wanted` is a number or "auto". At most one per stream."""
    if num_cores is None:
        num_cores = usable_cores()
    if wanted == AUTO:
        wanted = min(num_cores // CORES_EACH, num_streams // STREAMS_EACH, MAX_AUTO)
    return max(1, min(int(wanted), num_streams))


def split(load: Workload, max_concurrency: int | None, num: int) -> list[tuple[Workload, int | None]]:
    """Give every num-th request to the same process, so that all have similar arrivals, and divide the streams evenly."""
    return [
        (
            Workload(
                load.prompts[at::num],
                load.arrivals[at::num],
                None if load.output_lens is None else load.output_lens[at::num],
                load.after if num == 1 else None,
            ),
            None if max_concurrency is None else max_concurrency // num + (at < max_concurrency % num),
        )
        for at in range(num)
    ]


def merge(parts: list[list[RequestResult]]) -> list[RequestResult]:
    """Merge the results: the inverse of `split`."""
    merged: list[RequestResult] = [part[at] for at in range(len(parts[0])) for part in parts if at < len(part)]
    return merged


def send_all(
    arguments: argparse.Namespace, model: str, load: Workload, done: Callable[[int], object], num: int
) -> RunResult:
    """Send the workload from `num` processes. `done` is called with the number of further requests that have ended."""
    shares = [_Share(_picklable(arguments), model, *part) for part in split(load, arguments.max_concurrency, num)]
    if num == 1:
        results, seconds = _send(shares[0], lambda: None, lambda: done(1))
        return RunResult(results, [seconds])
    # Fresh interpreters: a fork would copy the event loop that the warm-up used.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num)
    started: dict[Connection, BaseProcess] = {}
    try:
        for share in shares:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(share, barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            started[ours] = process
        ends = _gather(list(started), done)
    finally:
        for child in started.values():
            child.terminate()  # a process that has sent its results has nothing left to do
            child.join()
    return RunResult(merge([results for results, _ in ends]), [seconds for _, seconds in ends])


def _gather(pipes: list[Connection], done: Callable[[int], object]) -> list[tuple[list[RequestResult], float]]:
    """Collect the result of each process, in order; progress goes to `done`."""
    ends: dict[Connection, tuple[list[RequestResult], float]] = {}
    while len(ends) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in ends]):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                raise RequestFailed("a client process ended before its requests did; see above") from None
            if isinstance(message, int):
                done(message)
            else:
                ends[pipe] = message
    return [ends[pipe] for pipe in pipes]


def _work(share: _Share, barrier: Any, pipe: Connection) -> None:
    """Run a client process. The barrier makes all processes start to send together."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        pipe.send(_send(share, lambda: barrier.wait(START_LIMIT_S), lambda: pipe.send(1)))


def _send(share: _Share, ready: Callable[[], object], done: Callable[[], object]) -> tuple[list[RequestResult], float]:
    async def send() -> tuple[list[RequestResult], float]:
        client = client_for(share.arguments)
        sender = Sender(client, share.arguments, share.model)
        ready()
        before = time.process_time()
        try:
            results = await drive(sender, share.load, share.max_concurrency, done)
        finally:
            await client.close()
        return results, time.process_time() - before

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(send())


def _picklable(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments without the command's function, which cannot be pickled and is not needed in the child."""
    return argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "run"})


def show_share(run_result: RunResult) -> str:
    num = len(run_result.cpu_seconds)
    text = f"{num} process{'es' if num > 1 else ''}, the busiest computing for {run_result.busiest:.0%} of the time"
    if math.floor(run_result.busiest * 100) >= 85:
        text += ": the client may be the bottleneck; raise --client-processes"
    return text
