"""Client processes of `octavo bench serve`: one load split over several, sent together, the records put together again.
Knows nothing of HTTP or of what the figures will be."""

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from octavo.cli.bench.sending import Record, Sender, client_for, drive, loop_factory
from octavo.cli.bench.workload import Workload
from octavo.config import AUTO
from octavo.errors import RequestFailed

CORES_EACH = 4  # the server needs the others
STREAMS_EACH = 32  # fewer would gain nothing
MAX_AUTO = 8
START_LIMIT_S = 120.0  # a process that is not there by then will not come


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]  # in order of the load
    cpu_seconds: list[float]  # of each process, while it sent and received

    @property
    def busiest(self) -> float:
        """The largest share of the run's time for which one of the processes computed: near 1, it was what was measured."""
        seconds = max(r.ended for r in self.records) - min(r.started for r in self.records)
        return min(1.0, max(self.cpu_seconds) / seconds) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process is to send, and where it goes."""

    arguments: argparse.Namespace
    model: str
    load: Workload
    max_concurrency: int | None


def num_processes(wanted: int | str, num_streams: int, num_cores: int | None = None) -> int:
    """`wanted` is a number or "auto". Never more than there are streams: each process has one at least."""
    if num_cores is None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted == AUTO:
        wanted = min(num_cores // CORES_EACH, num_streams // STREAMS_EACH, MAX_AUTO)
    return max(1, min(int(wanted), num_streams))


def split(load: Workload, max_concurrency: int | None, num: int) -> list[tuple[Workload, int | None]]:
    """Every num-th request to the same process, so that each sees the same arrivals; streams as evenly as they divide."""
    return [
        (
            Workload(load.prompts[at::num], load.arrivals[at::num]),
            None if max_concurrency is None else max_concurrency // num + (at < max_concurrency % num),
        )
        for at in range(num)
    ]


def merge(parts: list[list[Record]]) -> list[Record]:
    """The inverse of `split`."""
    merged: list[Record] = [part[at] for at in range(len(parts[0])) for part in parts if at < len(part)]
    return merged


def send_all(
    arguments: argparse.Namespace, model: str, load: Workload, done: Callable[[int], object], num: int
) -> Outcome:
    """`done` is told how many more requests have ended."""
    shares = [_Share(_plain(arguments), model, *part) for part in split(load, arguments.max_concurrency, num)]
    if num == 1:
        records, seconds = _send(shares[0], lambda: None, lambda: done(1))
        return Outcome(records, [seconds])
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
            child.terminate()  # those that have said all have nothing left to do
            child.join()
    return Outcome(merge([records for records, _ in ends]), [seconds for _, seconds in ends])


def _gather(pipes: list[Connection], done: Callable[[int], object]) -> list[tuple[list[Record], float]]:
    """What each process ended with, in their order; the news on the way go to `done`."""
    ends: dict[Connection, tuple[list[Record], float]] = {}
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
    """A client process. Nobody sends before everybody can."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        pipe.send(_send(share, lambda: barrier.wait(START_LIMIT_S), lambda: pipe.send(1)))


def _send(share: _Share, ready: Callable[[], object], done: Callable[[], object]) -> tuple[list[Record], float]:
    async def send() -> tuple[list[Record], float]:
        client = client_for(share.arguments)
        sender = Sender(client, share.arguments, share.model)
        ready()
        before = time.process_time()
        try:
            records = await drive(sender, share.load, share.max_concurrency, done)
        finally:
            await client.close()
        return records, time.process_time() - before

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(send())


def _plain(arguments: argparse.Namespace) -> argparse.Namespace:
    """Without the command's function, which cannot cross to another process and is not needed there."""
    return argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "run"})


def show_share(outcome: Outcome) -> str:
    num = len(outcome.cpu_seconds)
    text = f"{num} process{'es' if num > 1 else ''}, the busiest computing for {outcome.busiest:.0%} of the time"
    if math.floor(outcome.busiest * 100) >= 85:
        text += ": the client may be what was measured; raise --client-processes"
    return text
