"""Standard error of a server: a lost or missing stream never stops serving."""

import contextlib
import os
import sys


def say(line: str) -> None:
    """Write one line to standard error. Ignores a full disk and a closed pipe. A single write, so that lines of several threads
    do not mix."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"octavo: {line}\n")
        sys.stderr.flush()


def hold_standard_streams() -> None:
    """Open the null device for each of the descriptors 0 to 2 that is closed. Otherwise the next file or socket opened would get
    that number, and every process that we start would write its log there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def settle_standard_error() -> None:
    """Flush standard error before the exit. If that fails, redirect it to the null device: the interpreter's own flush at exit
    would fail too and change the exit code."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
