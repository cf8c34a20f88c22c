"""A server as a process: started with all cores, timed to its first token, stopped with all its child processes."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.loads import first_token

_ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.01
_STOP_LIMIT_S = 30
PORT = "{port}"
"""Placeholder for the port in a command."""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # extra fields of its requests
    start_limit_s: float = 120.0
    is_peer: bool = True
    is_float32: bool = False  # computes with weights as exact as the file's
    remark: str = ""  # what a reader of its figures must know


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int
    start_s: float  # from the process's start to its first token


class DidNotStart(Exception):
    pass


@contextlib.contextmanager
def started(server: Server) -> Iterator[Running]:
    port = _free_port()
    command = [text.replace(PORT, str(port)) for text in server.command]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", prefix="octavo-bench-", errors="replace") as log:
        began = time.perf_counter()
        # A session of its own: one signal ends all it leaves behind, and Ctrl-C reaches us first.
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment() | server.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (responded := first_token(url, server.fields) if _is_listening(port) else None) is None:
                if process.poll() is not None or time.perf_counter() - began > server.start_limit_s:
                    raise DidNotStart(_why(process, log, server.start_limit_s))
                time.sleep(_POLL_S)
            yield Running(url, process.pid, responded - began)
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    """Return our environment without variables that would limit a server's use of cores."""
    prefixes = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(process: subprocess.Popen[bytes], log: Any, limit_s: float) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    ended = f"no answer within {limit_s:g} s" if process.poll() is None else f"exit code {process.returncode}"
    return f"{ended}: {' / '.join(lines[-3:])}" if lines else ended


def _is_listening(port: int) -> bool:
    """Return whether the port is open: polled while the server needs the cores, and cheaper than a request."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
