"""Where compute threads may run: bound to one core each if requested; the calling thread is never bound."""

import os
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu.library import Threads

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity is read from /proc")


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def added(num_threads: int, first_cpu: int) -> list[set[int]]:
    """Return the allowed CPUs of each thread that a new pool starts."""
    before = threads()
    pool = Threads(num_threads, first_cpu)
    try:
        return [os.sched_getaffinity(thread) for thread in sorted(threads() - before)]
    finally:
        pool.close()


def test_threads_are_not_pinned_by_default() -> None:
    assert added(2, first_cpu=-1) == [os.sched_getaffinity(0)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_threads_are_bound_and_the_caller_is_not() -> None:
    allowed = os.sched_getaffinity(0)
    # A thread binds itself and may not have done so when the pool is ready, so try again for a while.
    for _ in range(1000):
        found = added(2, first_cpu=0)
        if found == [{sorted(allowed)[1]}]:
            break
    assert found == [{sorted(allowed)[1]}]
    assert os.sched_getaffinity(0) == allowed


def test_more_threads_than_cores_are_left_to_the_system() -> None:
    allowed = os.sched_getaffinity(0)
    assert added(2, first_cpu=len(allowed) - 1) == [allowed]
