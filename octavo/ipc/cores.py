"""How many cores this process may use, by its CPU affinity and its container's quota."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Number of usable cores, at least 1. With a quota of 2 on a machine with 64 it is 2: more threads slow each other down."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup"), cores)))


def _quota(root: Path, otherwise: int) -> int:
    """Whole cores that the control group at `root` grants, for cgroups v2 and v1; `otherwise` without a limit."""
    try:
        parts = (root / "cpu.max").read_text().split()
    except OSError:
        try:
            parts = [(root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        except OSError:
            return otherwise
    try:
        quota, period = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):  # "max": no limit
        return otherwise
    return quota // period if quota > 0 and period > 0 else otherwise
