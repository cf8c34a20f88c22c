"""Measures how fast a disk writes and reads, past the system's cache of files: whether a tier there can help."""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

NUM_BYTES = 32 * 2**20


class DiskPace(NamedTuple):
    """Bytes a second."""

    write: float
    read: float


def measure(folder: Path, num_bytes: int = NUM_BYTES) -> DiskPace:
    """Write a temporary file to the folder, or the nearest one above it that exists, and read it again. Raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        with contextlib.suppress(AttributeError, OSError):  # not on every system: then the cache of files is measured
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.read(len(block)):
            pass
        done = time.perf_counter()
    return DiskPace(num_bytes / (written - started), num_bytes / (done - begun))
