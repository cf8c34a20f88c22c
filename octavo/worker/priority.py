"""The priority of threads that work beside steps."""

import contextlib
import os
import sys
import threading

LOADING = 10
"""At nice 10 a thread gets about a tenth of a busy core and all of an idle one: a request waits for what is loaded."""
STORING = 19
"""The lowest priority: no request waits for what is stored."""


def give_way() -> None:
    """Let a step's thread that waits for this core go first. A thread of low priority, too, is left alone until the next tick of the system's
    clock once it runs; two ticks are 8 ms."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def yield_to_steps(nice: int) -> None:
    """Let the steps' threads go first from now on: on a CPU, steps take all cores. For the calling thread."""
    if sys.platform != "linux":  # elsewhere, threads have no priorities of their own
        return
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
