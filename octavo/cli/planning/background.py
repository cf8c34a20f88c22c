"""`octavo plan advise --json RECORDING` as a process that gives way to everything else: a server starts it (server/state/hints.py)."""

import contextlib
import os
import resource
import sys

from octavo.cli.main import main

CPU_SECONDS = 60


def give_way() -> None:
    """Compute only when nothing else wants to, and not for ever."""
    with contextlib.suppress(OSError):
        os.nice(19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))


if __name__ == "__main__":
    give_way()
    sys.exit(main(["plan", "advise", sys.argv[1], "--json"]))
