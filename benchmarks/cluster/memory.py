"""Memory of an index of many pages (resident, of this process), and how fast it takes events, snapshots and the loss of a replica."""

import argparse
import os
import time
from pathlib import Path

import numpy as np

from octavo.messages import PageEvents, PageSnapshot, ReplicaLoad
from octavo.routing import PrefixIndex

NAME = "memory"
MOST_BYTES = 400e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--grow", action="store_true", help="do not make room beforehand")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def highest() -> int:
    """Peak resident bytes of this process."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def run(arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    before = resident()
    index = PrefixIndex(0 if arguments.grow else arguments.pages)
    each = arguments.pages // arguments.replicas
    slowest, spent = 0.0, 0.0
    for replica in range(arguments.replicas):
        index.open(replica, 1)
        snapshot = PageSnapshot(replica, 1, 5, rng.integers(1, 2**64, each, np.uint64).tobytes(), ReplicaLoad())
        started = time.process_time()
        index.apply_snapshot(snapshot)
        seconds = time.process_time() - started
        slowest, spent = max(slowest, seconds), spent + seconds
        del snapshot
    grown, peak = resident() - before, highest() - before
    print(
        f"{len(index):,} pages of {arguments.replicas} replicas, {index.nbytes / len(index):.1f} bytes a page in tables"
    )
    print(f"resident: +{grown / 1e6:.0f} MB, at most +{peak / 1e6:.0f} MB while it was filled")
    print(f"from snapshots: {spent:.2f} s CPU for all, {slowest * 1e3:.0f} ms for the slowest of {each:,} pages")
    for size in (16, 128, 1024):
        spent, count = 0.0, 0
        while spent < 1.0:
            stored = rng.integers(1, 2**64, size, np.uint64).tobytes()
            number = 6 + 2 * count
            started = time.process_time()
            index.apply(PageEvents(0, 1, number, stored, b"", ReplicaLoad()))
            index.apply(PageEvents(0, 1, number + 1, b"", stored, ReplicaLoad()))
            spent += time.process_time() - started
            count += 1
        index.open(0, 1)
        print(
            f"events of {size:>5,} pages: {2 * size * count / spent:>10,.0f} pages/s, {spent / 2 / count * 1e6:.0f} µs each"
        )
    started = time.process_time()
    index.close(1)
    print(f"a replica is lost: {(time.process_time() - started) * 1e3:.0f} ms")
    if peak > MOST_BYTES:
        print(f"FAILED: more than {MOST_BYTES / 1e6:.0f} MB")
        raise SystemExit(1)
