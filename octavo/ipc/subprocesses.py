"""Starts Octavo's own child processes, and describes how they ended."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from octavo.config import KEY_VARIABLES

_KILL_FIRST = 1000  # the highest oom_score_adj
_PR_SET_PDEATHSIG = 1

KILLED_SECONDS = 5.0  # a killed process ends sooner, unless it is blocked in the kernel


def spawn(
    module: str, launch: msgspec.Struct, pass_fds: tuple[int, ...] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module as a child process and send it `launch`. It runs in its own session, so that Ctrl-C reaches the
    supervisor alone. Its standard input stays open for as long as this process lives: end of file tells it that we have
    died, or, after a line, that it is to stop. `launch` has the API keys where it needs them: neither its command line
    nor its environment does. `environment`: None for this process's own."""
    given = os.environ if environment is None else environment
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        env={name: value for name, value in given.items() if name not in KEY_VARIABLES},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    process.stdin.flush()
    return process


def signal_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux only). End of file on standard input says the same,
    but a process that is stopped or whose threads hang does not read it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def offer_to_oom_killer() -> None:
    """Have the kernel kill this process and its children first when the machine runs out of memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(f"{_KILL_FIRST}\n")


def reap_killed(process: subprocess.Popen[bytes], killed_at: float) -> bool:
    """Wait for the end of a process that was killed at this time.monotonic(). False: it does not end, because it waits for the system, as for a disk that does not
    answer. It cannot be ended: the caller leaves it behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, killed_at + KILLED_SECONDS - time.monotonic()))
    return process.returncode is not None


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
