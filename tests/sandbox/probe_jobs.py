"""Jobs for tests of the sandbox: they do what no job should. A fork server loads this module by its name."""

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import Field, Unsupported
from octavo.sandbox import confine

MODULE = __name__


def prepare(data: bytes) -> Mapping[str, Callable[..., Any]]:
    if data == b"broken":
        raise RuntimeError("this server does not start")
    if data == b"no filter":  # as on a system without one
        confine.restrict_system_calls = lambda: False
    return {
        job.__name__: job
        for job in (echo, environment, read, attempts, spin, doze, hoard, overflow, refuse, fail, end, talk)
    }


def echo(value: Any) -> Any:
    return value


def environment() -> dict[str, str]:
    return dict(os.environ)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def attempts(path: str) -> dict[str, str]:
    """What the system says to each attempt to leave: the name of an error, or "allowed"."""

    def result_of(attempt: Callable[[], object]) -> str:
        try:
            attempt()
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "?")
        except ValueError:  # what setrlimit makes of EPERM
            return "EPERM"
        return "allowed"

    return {
        "read a file": result_of(lambda: os.open(path, os.O_RDONLY)),
        "write a file": result_of(lambda: os.open(path + ".new", os.O_WRONLY | os.O_CREAT)),
        "remove a file": result_of(lambda: os.unlink(path)),
        "list a folder": result_of(lambda: os.listdir("/")),
        "make a socket": result_of(socket.socket),
        "fork": result_of(_fork),
        "run a program": result_of(lambda: os.execv("/bin/true", ["true"])),
        "start a process": result_of(lambda: subprocess.Popen(["/bin/true"])),
        "signal its parent": result_of(lambda: os.kill(os.getppid(), signal.SIGTERM)),
        "raise its limits": result_of(_raise_limit),
        "trace": result_of(_trace),
        "start a thread": result_of(lambda: threading.Thread(target=lambda: None).start()),
    }


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))


def _trace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def spin(seconds: float = 1e9) -> float:
    """Compute for so many seconds of CPU time."""
    while time.process_time() < seconds:
        pass
    return seconds


def doze(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def hoard() -> None:
    kept = []
    while True:
        kept.append(bytearray(2**20))


def overflow() -> None:
    """Crash as native code that recurses too deeply does."""
    ctypes.string_at(0)


def refuse(key: str) -> None:
    raise Unsupported(Field("tools", 0, key) + " is not supported beside " + Field("n"))


def fail() -> None:
    raise KeyError("a mistake of ours")


def end(code: int) -> None:
    os._exit(code)


def talk(num_bytes: int) -> bytes:
    return bytes(num_bytes)
