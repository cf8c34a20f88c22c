"""Confines a process for one job: no files, network or other processes, and limits on memory and CPU time."""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path

from octavo.ipc.subprocesses import signal_at_parents_end
from octavo.sandbox.seccomp import restrict_system_calls

_PR_SET_DUMPABLE = 4


def confine(seconds: float, memory_bytes: int, parent: int) -> bool:
    """Confine this process for one job. `seconds`: of CPU time, then SIGPROF ends it. `memory_bytes`: that it may allocate.
    `parent`: process id of the parent, with which this process ends. Returns whether system calls are restricted, too."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    for number, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, _mapped_bytes() + memory_bytes),
    ):
        with contextlib.suppress(
            OSError, ValueError
        ):  # not every system has each of them, and a hard limit may be lower already
            resource.setrlimit(number, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return restrict_system_calls()


def _mapped_bytes() -> int:
    """Address space that is in use."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
