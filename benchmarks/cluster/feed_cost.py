"""What a replica's feed adds to the host time of a step, at steady decode: steps with and without it, alternating in one run, CPU time."""

import argparse
import gc
import statistics
import time

from benchmarks.host_step import WARMUP, build, fill
from octavo.observe.replica_feed import ReplicaFeed

NAME = "feed"
PAIR = 20  # steps of each side, alternating


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2400)


def run(arguments: argparse.Namespace) -> None:
    loop, _ = build(arguments.rows, arguments.steps + WARMUP, False, time.perf_counter, (0,))
    fill(loop, arguments.rows, 0, arguments.steps + WARMUP + 8, False)
    for _ in range(WARMUP):
        loop.step()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    feed = ReplicaFeed(loop.scheduler, 0, 1)
    means: tuple[list[float], list[float]] = ([], [])
    for block in range(arguments.steps // PAIR):
        is_on = bool(block % 2)
        if is_on:
            loop.scheduler.cache.watch_pages()
            loop.observers.add(feed)
        started = time.thread_time()
        for _ in range(PAIR):
            loop.step()
            if is_on:
                feed.take()
        means[is_on].append((time.thread_time() - started) / PAIR)
        if is_on:
            loop.observers.remove(feed)
            loop.scheduler.cache.ignore_pages()
    differences = [on - off for off, on in zip(*means, strict=False)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    without = statistics.median(means[0])
    print(
        f"{arguments.rows} rows, {len(differences)} pairs of {PAIR} steps: {without * 1e6:.0f} µs a step without a feed"
    )
    print(
        f"with it {mean * 1e6:+.1f} µs ± {1.96 * error * 1e6:.1f} (95 %), {mean / without:+.1%}; an event in every step"
    )
