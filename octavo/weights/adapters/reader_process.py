"""AdapterReader: reads the headers of adapters in a process of its own.

A header may describe tens of thousands of matrices. Python's parsers share one lock with the other threads of their process, so an event
loop would wait for them. The process starts with the first adapter, has a lower priority, and ends after IDLE_SECONDS without another."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO

import msgspec

from octavo.errors import ConfigError
from octavo.ipc.memory_trim import keep_one_heap, trim_heap
from octavo.ipc.subprocesses import KILLED_SECONDS, describe_exit, offer_to_oom_killer, reap_killed, spawn
from octavo.weights.adapters.adapter_file import check_rank, open_adapter

IDLE_SECONDS = 60.0
READ_SECONDS = 60.0  # for one adapter, on the clock: the largest header takes less than a second
_ATTEMPTS = 2  # the process may end just before it is asked
_NICE = 10
_MODULE = __name__


class _Question(msgspec.Struct, frozen=True):
    path: str
    max_rank: int  # --max-lora-rank


class _Answer(msgspec.Struct, frozen=True):
    num_weights: int = 0  # of AdapterFile
    refusal: str = ""  # what is wrong with the adapter; empty: nothing


class AdapterReader:
    """Asks the process, which it starts. Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], str | None] = str  # once; also when this object is dropped

    @property
    def process_id(self) -> int | None:
        """None: no process was started, or it was seen to have ended."""
        return None if self._process is None else self._process.pid

    def num_weights(self, path: str, max_rank: int) -> int:
        """Check an adapter as far as that is possible without the base model, and count the numbers that are held for it. Raises ConfigError."""
        try:
            path.encode()
        except UnicodeEncodeError:  # a name that is no UTF-8: requests carry it in JSON
            raise ConfigError(f"{path!a} cannot be read: its name is not UTF-8") from None
        question, ended = _Question(path, max_rank), ""
        with self._turn:
            for _ in range(_ATTEMPTS):
                if self._is_closed:
                    break
                try:
                    answer = self._ask(question)
                except OSError as error:
                    ended = self._end() or str(error)
                    continue
                if answer.refusal:
                    raise ConfigError(answer.refusal)
                return answer.num_weights
        raise ConfigError(f"{path} cannot be read: the process that reads adapters was ended{ended and f' ({ended})'}")

    def close(self) -> None:
        """End the process for good. A thread that waits for it gets a ConfigError."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        if self._turn.acquire(timeout=KILLED_SECONDS):
            self._end()
            self._turn.release()

    def _ask(self, question: _Question) -> _Answer:
        """Raises OSError where the process has ended or cannot be started, ConfigError where it takes too long."""
        if self._process is None:
            self._process = spawn(_MODULE, question)  # its first line is the first question
            self._end_process = weakref.finalize(self, _end, self._process)
        else:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        assert self._process.stdout is not None
        if not _is_readable(self._process.stdout, READ_SECONDS):
            self._end()
            raise ConfigError(f"{question.path} cannot be read: that takes more than {READ_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise OSError("it has ended")
        return msgspec.json.decode(line, type=_Answer)

    def _end(self) -> str:
        """End the process. Returns how it ended; empty: there was none."""
        self._process = None
        return self._end_process() or ""


def _end(process: "subprocess.Popen[bytes]") -> str:
    """Returns how it ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):  # it may have ended before it read all
        process.stdin.close()
    process.stdout.close()
    code = process.poll()
    process.kill()
    reap_killed(process, time.monotonic())
    return describe_exit(process.returncode if code is None else code) if process.returncode is not None else "it hangs"


def main() -> None:
    keep_one_heap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    offer_to_oom_killer()
    os.nice(_NICE)
    gc.collect()
    gc.freeze()
    while (line := _next_line()) is not None:
        sys.stdout.buffer.write(msgspec.json.encode(_answer(msgspec.json.decode(line, type=_Question))) + b"\n")
        sys.stdout.buffer.flush()
        trim_heap()


def _next_line() -> bytes | None:
    """None: there is no other, or none has come for long. Each question is answered before the next, so none lies in the buffer."""
    return sys.stdin.buffer.readline() or None if _is_readable(sys.stdin.buffer, IDLE_SECONDS) else None


def _is_readable(file: IO[bytes], seconds: float) -> bool:
    """Wait until the file can be read, or has ended. poll() takes any descriptor; select() none above 1023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _answer(question: _Question) -> _Answer:
    try:
        file = open_adapter(question.path)
        check_rank(file, question.max_rank)
    except ConfigError as error:
        return _Answer(refusal=str(error))
    return _Answer(file.num_weights)


if __name__ == "__main__":
    main()
