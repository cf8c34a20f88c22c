"""How a replica's engine is started and ended, and how its supervisor hears of it. Engines on this machine are child processes."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Protocol

from octavo.config import Config
from octavo.ipc.launch import EngineLaunch
from octavo.ipc.subprocesses import KILLED_SECONDS, describe_exit, reap_killed, spawn
from octavo.supervisor.shares import Share, gpus, own_cores, share_of


class EngineProcess(Protocol):
    """A started engine. Its first line is its EngineReport; there are no others."""

    place: str
    """Where it is, for people; empty: its share of this machine says so."""
    is_waiting: bool
    """It waits for room in a cluster, and is not starting yet."""
    placed: float
    """time.monotonic() when it had room; 0: it never waited."""
    pid: int
    is_left_behind: bool
    """It was killed, has not ended, and counts as ended."""

    def fileno(self) -> int:
        """A descriptor that is readable when there are lines to read, or the engine has ended."""

    def read_lines(self) -> list[bytes] | None:
        """The lines that have come. None: the engine has ended."""

    def wait(self) -> int:
        """Wait for its end, which has been seen or is certain, and return the exit code. A killed engine that has not ended after KILLED_SECONDS is left behind."""

    def poll(self) -> int | None:
        """The exit code. None: it runs."""

    def kill(self) -> None:
        """End it at once. It must not send anything afterwards that its clients would take."""

    def give_up_if_unkillable(self) -> bool:
        """Leave it behind if it was killed KILLED_SECONDS ago and has not ended. → whether it is."""

    def stop(self) -> None:
        """Ask it to end. It closes its recording first."""

    def describe(self, code: int) -> str:
        """How it has ended, for the log."""


class Launcher(Protocol):
    is_remote: bool
    """Whether engines may be on other machines."""
    words: str
    """About it, for the log at the start; empty: nothing."""

    def share(self, config: Config, replica: int, num_replicas: int) -> Share:
        """What one of several replicas gets. Raises ConfigError if there is too little."""

    def recording(self, config: Config) -> Config:
        """The configuration for recordings that this process keeps."""

    def close(self) -> None:
        """Free what it holds, after all engines have ended or were killed."""

    def start(
        self, module: str, launch: EngineLaunch, fds: tuple[int, ...], environment: Mapping[str, str]
    ) -> EngineProcess:
        """Start an engine. `fds`: shared memory that engines on this machine inherit. `environment`: variables to add."""


class LineReader:
    """Splits what comes from a pipe into lines, without waiting."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """The lines that have come. None: the other end is closed, and all lines were read."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class LocalEngine:
    """An engine as a child process. Closing its standard input asks it to end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self.place, self.is_waiting, self.placed = "", False, 0.0
        self.pid, self.is_left_behind = process.pid, False
        self._killed_at = 0.0  # 0: it was not
        self._fd = process.stdout.fileno()
        self._lines = LineReader(self._fd)

    def fileno(self) -> int:
        return self._fd

    def read_lines(self) -> list[bytes] | None:
        return self._lines.read()

    def wait(self) -> int:
        if not self._killed_at:
            return self.process.wait()
        self.is_left_behind = not reap_killed(self.process, self._killed_at)
        return -signal.SIGKILL if self.is_left_behind else self.process.returncode

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.is_left_behind else self.process.poll()

    def kill(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def give_up_if_unkillable(self) -> bool:
        is_due = self._killed_at and time.monotonic() - self._killed_at >= KILLED_SECONDS
        self.is_left_behind = self.is_left_behind or bool(is_due and self.process.poll() is None)
        return self.is_left_behind

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"stop\n")  # without a word it means that we have died
            self.process.stdin.close()

    def describe(self, code: int) -> str:
        return describe_exit(code)


class LocalLauncher:
    """Starts engines on this machine."""

    is_remote = False
    words = ""

    def share(self, config: Config, replica: int, num_replicas: int) -> Share:
        return share_of(config, replica, num_replicas, gpus(), own_cores())

    def recording(self, config: Config) -> Config:
        return config

    def close(self) -> None:
        pass

    def start(
        self, module: str, launch: EngineLaunch, fds: tuple[int, ...], environment: Mapping[str, str]
    ) -> EngineProcess:
        return LocalEngine(spawn(module, launch, fds, {**os.environ, **environment} if environment else None))
