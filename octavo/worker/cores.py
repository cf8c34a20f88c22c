"""How many cores this process may really use: its affinity, and its container's quota.
Knows nothing of ranks or threads."""

import os
from pathlib import Path


def usable_cores() -> int:
    """At least 1. A quota of two cores on a machine of sixty-four is two: more threads only get in each other's way."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup"), cores)))


def _quota(root: Path, otherwise: int) -> int:
    """Whole cores that the control group at `root` grants (version 2's file, or version 1's)."""
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
