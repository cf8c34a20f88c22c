"""`octavo plan advise --json RECORDING` as a process that gives way to everything else: a server starts it (server/state/hints.py)."""

import contextlib
import os
import resource
import sys
from pathlib import Path

import numpy as np

from octavo.cli.main import main
from octavo.ipc.subprocesses import offer_to_oom_killer
from octavo.server.state.hints import EXIT_MEMORY

CPU_SECONDS = 60


def give_way() -> None:
    """Compute only when nothing else wants to, and not for ever."""
    with contextlib.suppress(OSError):
        os.nice(19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))


def limit_memory(num_bytes: int) -> None:
    """Have allocations fail beyond `num_bytes` more than this process has now. Only Linux counts them."""
    if sys.platform != "linux":
        return
    np.linalg.lstsq(np.eye(2), np.ones(2))  # what it allocates once is there: without it, it would end the process
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    limit, (_, hard) = now + num_bytes, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def run(recording: str, memory_bytes: int) -> int:
    give_way()
    offer_to_oom_killer()
    limit_memory(memory_bytes)
    try:
        return main(["plan", "advise", recording, "--json"])
    except (MemoryError, SystemError):  # the second: native code that got no memory and did not say so
        return EXIT_MEMORY


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2])))
