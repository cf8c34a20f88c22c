"""The priority of threads that work beside steps."""

import contextlib
import os
import threading

# A tenth of a core that steps use all of, and all of one that they do not: a request waits for what is loaded.
_NICE = 10


def give_way() -> None:
    """Let a step's thread that waits for this core go first. A thread of low priority, too, is left alone until the next tick of the system's
    clock once it runs; two ticks are 8 ms."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def yield_to_steps() -> None:
    """Let the steps' threads go first from now on. For a thread that loads something: on a CPU, steps take all cores."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has priorities of threads
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
