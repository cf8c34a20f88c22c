"""One clock for processes on several machines. Times in messages and in shared memory are CLOCK_MONOTONIC, which counts from each
machine's start; a process that belongs to a server on another machine shifts its own."""

import time
from pathlib import Path


def boot_id() -> str:
    """Names this start of this machine: processes with the same one share a clock. Empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def shift(offset: int) -> None:
    """Subtract nanoseconds from what time.monotonic() and time.monotonic_ns() return from now on. To be called before modules are imported
    that keep a reference to them. Differences of times stay what they are, so that timeouts of libraries do, too."""
    monotonic, monotonic_ns, seconds = time.monotonic, time.monotonic_ns, offset / 1e9

    def shifted() -> float:
        return monotonic() - seconds

    def shifted_ns() -> int:
        return monotonic_ns() - offset

    time.monotonic, time.monotonic_ns = shifted, shifted_ns
