"""Processes of our own: how they are started, and how their end is told.
Knows nothing of what they do."""

import ctypes
import signal
import subprocess
import sys

import msgspec

_PR_SET_PDEATHSIG = 1


def spawn(module: str, order: msgspec.Struct, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A process of our own, in a session of its own so that Ctrl-C reaches the supervisor alone. Its standard input stays
    open for as long as this process lives: that is how it learns of our death."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.flush()
    return process


def signal_at_parents_end(number: signal.Signals) -> None:
    """To this process, where the kernel can: standard input says the same, but not to a process that was stopped or whose threads
    wait for one that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
