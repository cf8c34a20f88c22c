"""The fork server: loads what jobs need once, and forks a confined process for each of them. Start it with
octavo.ipc.subprocesses.spawn().

It has one thread and runs no job itself, so no job can change its state. It ends when its control socket is closed,
and its children with it. Children have no other descriptor than their job's socket."""

import contextlib
import errno
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.ipc.memory_trim import keep_one_heap, trim_heap
from octavo.ipc.subprocesses import offer_to_oom_killer
from octavo.sandbox.confine import confine
from octavo.sandbox.errors_as_data import error_data
from octavo.sandbox.protocol import (
    COMMAND,
    EXIT_NO_MEMORY,
    EXIT_NO_PROCESS,
    FORK,
    LENGTH,
    NOTICE,
    READY,
    Reply,
    SandboxLaunch,
)
from octavo.text.grammar.limits import on_stack

Job = Callable[..., Any]

_MAX_DESCRIPTORS = 1024  # the server itself opens about ten


def main() -> None:
    keep_one_heap()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=SandboxLaunch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Jobs cannot open the time zone's file. The C library reads it again unless TZ names it.
    os.environ.setdefault("TZ", ":/etc/localtime")
    time.tzset()
    offer_to_oom_killer()
    jobs: Mapping[str, Job] = importlib.import_module(launch.module).prepare(launch.data)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    trim_heap()
    _Server(launch, jobs).run()


class _Server:
    def __init__(self, launch: SandboxLaunch, jobs: Mapping[str, Job]) -> None:
        self._launch, self._jobs = launch, jobs
        self._control = socket.socket(fileno=launch.control_fd)
        self._null = os.open(os.devnull, os.O_RDWR)
        self._children: dict[
            int, int
        ] = {}  # number → process id, until it is reaped: until then no other process has this id
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._notify(READY, 0, 0)
            poll = select.poll()  # not select(), which fails for descriptors above 1,023
            poll.register(self._control, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self._read_command():
                    break
        for process in self._children.values():
            os.kill(process, signal.SIGKILL)

    def _read_command(self) -> bool:
        """Read a command and carry it out. False: the pool has closed the socket."""
        command, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(command) < COMMAND.size:
            return False
        what, number = COMMAND.unpack(command)
        if what == FORK:
            self._fork(number, descriptors[0])
        elif number in self._children:
            os.kill(self._children[number], signal.SIGKILL)
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            self._notify(number, EXIT_NO_PROCESS, 0)
            process = -1
        if process == 0:
            try:
                self._serve(descriptor, parent)
            finally:
                os._exit(1)
        os.close(descriptor)
        if process > 0:
            self._children[number] = process

    def _reap(self) -> None:
        numbers = {process: number for number, process in self._children.items()}
        while self._children:
            process, status, usage = os.wait4(-1, os.WNOHANG)
            if not process:
                break
            number = numbers[process]
            del self._children[number]
            unit = 1024 if sys.platform == "darwin" else 1  # of ru_maxrss: bytes there, KiB elsewhere
            self._notify(number, os.waitstatus_to_exitcode(status), usage.ru_maxrss // unit)

    def _notify(self, number: int, code: int, most_kib: int) -> None:
        self._control.sendall(NOTICE.pack(number, code, most_kib))

    def _serve(self, descriptor: int, parent: int) -> None:
        """Run the job that comes over `descriptor`, in a child, and end."""
        for number in (signal.SIGCHLD, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for standard in range(3):
            os.dup2(self._null, standard)
        os.dup2(descriptor, 3)
        os.closerange(4, _MAX_DESCRIPTORS)
        launch = self._launch
        confine(launch.seconds, launch.memory_bytes + launch.stack_bytes, parent)
        job = _read(3)
        if job is None:
            os._exit(0)  # the pool closes
        try:
            reply = self._run(job)
            _write(3, msgspec.msgpack.encode(reply))
        except MemoryError:
            os._exit(EXIT_NO_MEMORY)
        os._exit(0)

    def _run(self, job: bytearray) -> Reply:
        name, arguments = marshal.loads(job)
        try:
            return Reply("done", on_stack(self._launch.stack_bytes, lambda: self._jobs[name](*arguments)))
        except RequestError as error:
            return Reply("refused", error_data(error))
        except MemoryError:
            return Reply("no_memory")
        except Exception:
            return Reply("failed", traceback.format_exc())


def _read(descriptor: int) -> bytearray | None:
    """Read a job. None: the other end was closed."""
    head = _read_exactly(descriptor, LENGTH.size)
    return None if head is None else _read_exactly(descriptor, *LENGTH.unpack(head))


def _read_exactly(descriptor: int, num_bytes: int) -> bytearray | None:
    data = bytearray()
    while len(data) < num_bytes:
        piece = os.read(descriptor, min(num_bytes - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return data


def _write(descriptor: int, data: bytes) -> None:
    for piece in (LENGTH.pack(len(data)), data):
        view = memoryview(piece)
        while view:
            view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
