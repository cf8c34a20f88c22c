"""A server's processes as the system sees them: their memory, and the CPU time of the server and of the whole machine.
Linux only: it reads /proc."""

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Work(NamedTuple):
    """CPU seconds so far."""

    machine: float  # all processes, and time stolen by the hypervisor
    server: float


def tree(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def resident_bytes(pid: int) -> int:
    """PSS of the whole tree: memory that several processes share counts once."""
    total = 0
    for member in tree(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):  # the process has just ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def work(pid: int) -> Work:
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = ticks[3] + ticks[4]
    stats = [fields for member in tree(pid) if (fields := _stat(member))]
    # utime, stime, and those of children that have ended.
    own = sum(int(fields[at]) for fields in stats for at in (11, 12, 13, 14))
    return Work((sum(ticks[:8]) - idle) / _TICKS, own / _TICKS)


def _stat(pid: int) -> list[str]:
    """Return the fields after the name (which may contain anything): state, parent, …; empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ProcessLookupError):
        return []
