"""A rank's side of its grammar processes: the fork server that makes them, and one object for each."""

import contextlib
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import octavo
from octavo.errors import ConfigError, OctavoError
from octavo.ipc.readable import is_readable
from octavo.ipc.subprocesses import describe_exit
from octavo.sampling.grammar.protocol import (
    Begin,
    Begun,
    Command,
    Compile,
    Compiled,
    End,
    Fill,
    Filled,
    Fork,
    Inbox,
    framed,
    receive,
)

_STDERR = 2
_START_SECONDS = 120.0  # for a fork server to read the vocabulary; it takes about one
_PIECE = 2**18  # bytes read at once
_LONG_COMPILE = 1.0  # seconds after which a compilation has a low priority
_NICE = 10
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGXCPU)


class ForkServer:
    """Reads the vocabulary once, and forks a process for each grammar. Any thread may call it."""

    def __init__(self, begin: Begin, memory: int) -> None:
        """`memory`: descriptor of the slots' memory."""
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), memory)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.sampling.grammar.process", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env=_environment(),
            )
        self._line.settimeout(_START_SECONDS)
        try:
            self._line.sendall(framed(begin))
            begun = msgspec.msgpack.decode(receive(self._line), type=Begun)
        except (EOFError, OSError) as error:
            self.close()
            raise ConfigError(f"the fork server for grammars {self._end()}") from error
        if begun.error:
            self.close()
            raise ConfigError(begun.error)

    def fork(self) -> tuple[int, socket.socket]:
        """Start a process. → its id, and a socket to it. Raises OSError or EOFError when the server has ended."""
        with self._lock:
            self._line.sendall(framed(Fork()))
            inbox, fds = Inbox(), []
            while True:
                data, received, *_ = socket.recv_fds(self._line, 64, 1)
                if not data:
                    raise EOFError
                fds += received
                for message in inbox.add(data):
                    return msgspec.msgpack.decode(message, type=int), socket.socket(fileno=fds[0])

    def end(self, pid: int) -> int:
        """Kill a process if it still runs. → its exit code; negative: a signal."""
        with self._lock:
            self._line.sendall(framed(End(pid)))
            return msgspec.msgpack.decode(receive(self._line), type=int)

    def close(self) -> None:
        """End it, and with it all of its processes."""
        self._line.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _end(self) -> str:
        code = self._process.poll()
        return "did not start in time" if code is None else f"has ended ({describe_exit(code)})"


class GrammarProcess:
    """The process of one grammar, from the start of its compilation to its end. compile() is called by one thread; when it is ready,
    another gives it commands and reads the results, and never waits for it."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.started = threading.Event()  # compile() is over: it is ready, or it has an error
        self.is_over = False
        self.error = ""  # why it can compute no masks
        self.was_ready = False  # its grammar was compiled
        self.is_slow = False  # it has ended because it took too long
        self.was_killed = (
            False  # it was ended by something other than its grammar: another process, or its fork server's end
        )
        self.end_words = "its process has ended"
        # Row that has left → its slots, which the process may still write to, and how often it has yet to answer for the row.
        self.retired: dict[int, tuple[list[int], int]] = {}
        self.looks_from = self.num_bytes = 0
        self.num_unanswered = 0  # Fill commands
        self._asked: deque[Fill] = deque()  # those commands
        self.plainly_filled: Fill | None = (
            None  # the last one that was answered, if the answer for all of its rows was plain
        )
        self._looked_at = 0.0  # when the oldest of them was given, or when add_wait() was last called, if that is later
        self._seconds = 0.0  # counted for the oldest command
        self.pid = 0
        self._is_lowered = False
        self._line: socket.socket | None = None
        self._outbox = bytearray()
        self._inbox = Inbox()
        self._decoder = msgspec.msgpack.Decoder(Filled)

    @property
    def is_ready(self) -> bool:
        return self.started.is_set() and not self.is_over

    def compile(self, server: Callable[[], ForkServer], compile_seconds: float) -> None:
        """Start the process and wait until its grammar is compiled. It is ended if that takes too long."""
        pid = 0
        try:
            pid, line = server().fork()
            self.pid, self._line = pid, line
            # Its own limit counts processor time. This one is for a process that waits instead of computing.
            line.settimeout(20 * compile_seconds)
            line.sendall(framed(Compile(self.grammar)))
            if not is_readable(line.fileno(), _LONG_COMPILE):
                self.lower()
            compiled = msgspec.msgpack.decode(receive(line), type=Compiled)
            line.setblocking(False)
            self.looks_from, self.num_bytes = compiled.looks_from, compiled.num_bytes
            self.was_ready = not compiled.error
            if compiled.error:
                self.fail(f"the grammar could not be compiled: {compiled.error}")
        except (EOFError, OSError) as error:
            why = str(error)
            if pid:
                self.end(server)
                why = self.end_words
            if self.is_slow or isinstance(error, TimeoutError):
                why = f"it takes more than {compile_seconds:g} s of processor time"
            self.fail(f"the grammar could not be compiled: {why}")
        except Exception as error:  # the model's vocabulary cannot be read, or not be used
            self.fail(f"the grammar could not be compiled: {error}")
        finally:
            self.started.set()

    def lower(self) -> None:
        """Lower its priority: a process that takes long must not slow down steps. For good: not every user may raise a priority
        again."""
        if self._is_lowered:
            return
        self._is_lowered = True
        with contextlib.suppress(OSError):  # it has ended, or this is not Linux
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), _NICE)

    def queue(self, command: Command) -> None:
        """Give it a command. send() writes it when the process can read it."""
        self._outbox += framed(command)

    def ask(self, command: Fill) -> None:
        if not self.num_unanswered:
            self._begin_wait()
        self.num_unanswered += 1
        self._asked.append(command)
        self.queue(command)
        self.send()

    def _begin_wait(self) -> None:
        self._looked_at, self._seconds = time.monotonic(), 0.0

    def add_wait(self, most: float) -> float:
        """Return the seconds for which the oldest command has been without an answer. Each call adds at most `most`, so that a pause of the whole
        server does not count as a hang."""
        now = time.monotonic()
        self._seconds += min(most, now - self._looked_at)
        self._looked_at = now
        return self._seconds

    def send(self) -> None:
        if self._line is None or self.is_over:
            return
        try:
            while self._outbox:
                del self._outbox[: self._line.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended; results() says so
            self._outbox.clear()

    def results(self) -> Iterator[tuple[Fill, Filled]]:
        """The commands that it has answered since the last call, and its answers. If it has ended, is_over is set."""
        while self._line is not None and not self.is_over:
            try:
                data = self._line.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_over = True
                return
            for message in self._inbox.add(data):
                self.num_unanswered -= 1
                self._begin_wait()
                filled, asked = self._decoder.decode(message), self._asked.popleft()
                self.plainly_filled = None if filled.rows else asked
                yield asked, filled
            if not self.num_unanswered:  # there is nothing to read; its end is seen the next time
                return

    def fileno(self) -> int:
        assert self._line is not None, "it has started"
        return self._line.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def end(self, server: Callable[[], ForkServer]) -> None:
        """End the process, if it has not ended by itself, and note how it ended."""
        try:
            code = server().end(self.pid)
        except (EOFError, OSError, OctavoError):  # the fork server has ended, and its processes with it
            self.was_killed = True
            return
        self.is_slow |= -code in _OUT_OF_TIME
        self.was_killed = code in (0, -signal.SIGKILL) and not self.is_slow
        self.end_words = f"its process has ended ({describe_exit(code)})"

    def fail(self, error: str) -> None:
        self.error, self.is_over = error, True
        self.close()

    def close(self) -> None:
        """Close its socket. The process ends when it next reads from it."""
        self.is_over = True
        if self._line is not None:
            self._line.close()


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    root = str(Path(octavo.__file__).parent.parent)
    if root not in site.getsitepackages():  # run from a checkout: the child must find the same code
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    # One thread forks, and no other may be there: a lock that it held would never be released in the child.
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    return environment
