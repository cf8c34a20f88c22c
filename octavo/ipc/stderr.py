"""What a server says on standard error, and that there is such a thing: whatever becomes of it, serving goes on.
Knows nothing of what is said."""

import contextlib
import os
import sys


def say(line: str) -> None:
    """A full disk or a reader that left is no reason to stop. In one piece: threads that speak at once each have their line."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"octavo: {line}\n")
        sys.stderr.flush()


def hold_standard_streams() -> None:
    """Where a descriptor from 0 to 2 is closed, what is opened next gets its number, a socket maybe, and every process that
    we start would write its log there. So each of them is something, if only the null device."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def settle_standard_error() -> None:
    """What cannot be written any more must not become the exit code, as it would at the interpreter's end."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
