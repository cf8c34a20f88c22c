"""SandboxPool: runs jobs on untrusted input in confined processes, one process for each job.

The first job starts a fork server (fork_server.py), which keeps a few forked processes waiting. A job that crashes, or takes more
than its share of time or memory, ends with its process; the caller gets a JobEnded, and no other job notices.

Owners are served round-robin. A job that has run for QUICK_SECONDS is slow: only half of the processes run slow jobs, and one too many
is stopped and started again later, so that quick jobs never wait long for slow ones, even of the same owner."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from octavo.errors import EngineUnavailable, Overloaded
from octavo.ipc.subprocesses import describe_exit, spawn
from octavo.sandbox.errors_as_data import error_of_data
from octavo.sandbox.fair_queue import FairQueue
from octavo.sandbox.protocol import (
    COMMAND,
    EXIT_NO_MEMORY,
    FORK,
    KILL,
    LENGTH,
    NOTICE,
    Reply,
    SandboxLaunch,
)

log = logging.getLogger("octavo.sandbox")

QUICK_SECONDS = 0.25
WALL_TIMES = 6  # wall-clock limit of a job, as a multiple of its CPU limit: other processes need the cores, too
MAX_WAITING_BYTES = 64 * 2**20  # of jobs in the queue
MAX_REPLY_BYTES = 64 * 2**20
LARGE_REPLY = 2**20  # bytes; decoded in a thread
NOTICE_SECONDS = 5.0  # to wait for the notice of a process that has closed its socket
START_SECONDS = 60.0  # for a fork server to load
RESTART_SECONDS = 1.0  # between two starts of a fork server that does not last
MAX_ATTEMPTS = 2  # of a job whose process was ended from outside

_PASSED = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
Cause = Literal["time", "memory", "crash"]
_TIME_SIGNALS, _OUT_OF_MEMORY_SIGNALS = (-27, -24), (-6, -9)  # SIGPROF, SIGXCPU; SIGABRT, SIGKILL


class JobEnded(Exception):
    """The job's process was ended before it had a result."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause, self.detail = cause, detail


class JobFailed(Exception):
    """The job raised an error that is not about its input: a mistake of ours. Holds its traceback."""


class _LostProcess(Exception):
    """The job's process was ended from outside, or never began."""


@dataclass(eq=False, slots=True)
class _Job:
    """A job that waits or runs."""

    owner: bytes
    payload: bytes
    result: "asyncio.Future[Reply]"
    is_slow: bool = False
    num_attempts: int = 0
    child: "_Child | None" = None


@dataclass(eq=False, slots=True)
class _Child:
    """A forked process, waiting for its job or running it."""

    number: int
    channel: socket.socket
    ended: "asyncio.Future[tuple[int, int]]"  # exit code, most KiB of memory
    killed_for: Literal["", "time", "slow", "abandoned"] = ""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class SandboxPool:
    def __init__(
        self,
        module: str,
        data: bytes = b"",
        *,
        num_processes: int,
        seconds: float,
        memory_bytes: int,
        stack_bytes: int,
        max_waiting: int,
    ) -> None:
        """`module`: has prepare(data) → jobs by name, called once in the fork server. Limits for each job: `seconds` of CPU time,
        `memory_bytes` beside what the module takes, `stack_bytes`."""
        self._module, self._data = module, data
        self._num_processes, self._max_waiting = num_processes, max_waiting
        self._max_slow = max(1, num_processes // 2)
        self._seconds, self._memory_bytes, self._stack_bytes = seconds, memory_bytes, stack_bytes
        self._thread = ThreadPoolExecutor(1, "octavo-sandbox")  # starts the server, encodes and decodes large jobs
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._last_start = float("-inf")
        self._notices = bytearray()
        self._next_number = 0
        self._children: dict[int, _Child] = {}  # all whose end was not noticed yet
        self._idle: deque[_Child] = deque()
        self._running: set[_Job] = set()
        self._quick: FairQueue[_Job] = FairQueue()
        self._slow: FairQueue[_Job] = FairQueue()
        self._talks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def server_process(self) -> int | None:
        """The fork server's process id. None: it has not been started, or has ended."""
        return None if self._server is None else self._server.pid

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._quick) + len(self._slow)

    async def run(self, payload: bytes, owner: bytes = b"") -> Any:
        """Run a job and return its result. `payload`: marshal.dumps((name, arguments)). Cancelling ends the job.

        Raises the RequestError that the job raised; JobEnded; Overloaded where too many wait; EngineUnavailable where no process
        can be started."""
        if self._is_closed:
            raise EngineUnavailable("the server is shutting down")
        self._make_room(owner, len(payload))
        job = _Job(owner, payload, asyncio.get_running_loop().create_future())
        self._quick.put(job)
        self._dispatch()
        try:
            reply = await job.result
        except BaseException:
            self._abandon(job)
            raise
        match reply.status:
            case "done":
                return reply.value
            case "refused":
                raise error_of_data(reply.value)
            case "no_memory":
                raise JobEnded("memory", "no memory left")
            case "failed":
                raise JobFailed(str(reply.value))

    async def in_thread(self, work: Any, *arguments: Any) -> Any:
        """Run short work of the caller's in the pool's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the fork server and all jobs, whose callers get EngineUnavailable."""
        self._is_closed = True
        for job in [*self._quick, *self._slow, *self._running]:
            if not job.result.done():
                job.result.set_exception(EngineUnavailable("the server is shutting down"))
        self._quick, self._slow = FairQueue(), FairQueue()
        for task in [*self._talks, *([] if self._starting is None else [self._starting])]:
            task.cancel()
        self._lose_server("")
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ── the queue ──

    def _make_room(self, owner: bytes, num_bytes: int) -> None:
        """Raise Overloaded where the queue is full, unless another owner has more jobs in it: then the newest of those gives way."""
        queues = (self._quick, self._slow)
        while self.num_waiting and (
            self.num_waiting >= self._max_waiting
            or sum(len(job.payload) for queue in queues for job in queue) + num_bytes > MAX_WAITING_BYTES
        ):
            queue = max(queues, key=len)
            largest = queue.largest_owner()
            if sum(queue.num_of(largest) for queue in queues) <= 1 + sum(queue.num_of(owner) for queue in queues):
                raise self._overloaded()
            queue.take_newest(largest).result.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"{self.num_waiting} grammars and templates wait to be compiled, which is the limit (--max-waiting-grammars)",
            max(1, round(self._seconds)),
        )

    def _dispatch(self) -> None:
        """Begin jobs while there are processes for them, and keep processes waiting for the next."""
        if self._control is None:
            self._start()
            return
        self._fill()
        while self._idle and len(self._running) < self._num_processes:
            num_slow = sum(job.is_slow for job in self._running)
            if self._slow and (num_slow < self._max_slow or not self._running):
                job = self._slow.take()
            elif self._quick:
                job = self._quick.take()
            else:
                break
            self._running.add(job)
            child = self._idle.popleft()
            talk = asyncio.get_running_loop().create_task(self._talk(job, child))
            self._talks.add(talk)
            talk.add_done_callback(partial(self._end_talk, child))
            self._fill()

    def _fill(self) -> None:
        while self._control is not None and len(self._idle) + len(self._running) < self._num_processes:
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                self._next_number = self._next_number % (2**32 - 1) + 1  # never READY
                child = _Child(self._next_number, ours, asyncio.get_running_loop().create_future())
                try:
                    socket.send_fds(self._control, [COMMAND.pack(FORK, child.number)], [theirs.fileno()])
                except OSError as error:  # it has ended, or does not read
                    ours.close()
                    self._lose_server(str(error))
                    return
            self._children[child.number] = child
            self._idle.append(child)

    def _abandon(self, job: _Job) -> None:
        """The caller no longer wants the job, or has its result."""
        for queue in (self._quick, self._slow):
            queue.discard(job)
        if job.child is not None:
            self._kill(job.child, "abandoned")

    # ── one job ──

    async def _talk(self, job: _Job, child: _Child) -> None:
        """Have `child` run the job, and set its result, queue it again or fail it."""
        loop = asyncio.get_running_loop()
        job.child, job.num_attempts = child, job.num_attempts + 1
        child.timers.append(loop.call_later(WALL_TIMES * self._seconds, self._kill, child, "time"))
        if not job.is_slow:
            child.timers.append(loop.call_later(QUICK_SECONDS, self._slow_down, job, child))
        try:
            reply = await self._exchange(job, child)
            if not job.result.done():
                job.result.set_result(reply)
        except _LostProcess as error:
            job.num_attempts -= child.killed_for == "slow"
            if job.result.done():
                pass  # abandoned
            elif job.num_attempts < MAX_ATTEMPTS:
                (self._slow if job.is_slow else self._quick).put(job)
            else:
                job.result.set_exception(EngineUnavailable(f"the process that compiles was ended: {error}"))
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
        finally:
            for timer in child.timers:
                timer.cancel()
            job.child = None
            self._running.discard(job)
        self._dispatch()

    def _end_talk(self, child: _Child, talk: "asyncio.Task[None]") -> None:
        """Also of a talk that was cancelled before it began."""
        self._talks.discard(talk)
        child.channel.close()

    async def _exchange(self, job: _Job, child: _Child) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(child.channel, LENGTH.pack(len(job.payload)))
            await loop.sock_sendall(child.channel, job.payload)
            head = await self._receive(child, LENGTH.size)
            (num_bytes,) = LENGTH.unpack(head)
            if num_bytes > MAX_REPLY_BYTES:
                self._kill(child, "abandoned")
                raise JobEnded("memory", f"a result of {num_bytes} bytes")
            data = await self._receive(child, num_bytes)
        except (ConnectionError, EOFError):
            raise await self._why_ended(child) from None
        decode = msgspec.msgpack.Decoder(Reply).decode
        return await self.in_thread(decode, data) if num_bytes > LARGE_REPLY else decode(data)

    async def _receive(self, child: _Child, num_bytes: int) -> bytearray:
        data, loop = bytearray(), asyncio.get_running_loop()
        while len(data) < num_bytes:
            piece = await loop.sock_recv(child.channel, min(num_bytes - len(data), 2**20))
            if not piece:
                raise EOFError
            data += piece
        return data

    async def _why_ended(self, child: _Child) -> Exception:
        """The error for a process that ended without a reply."""
        if child.killed_for == "time":
            return JobEnded("time", "killed")
        if child.killed_for:
            return _LostProcess(child.killed_for)
        try:
            async with asyncio.timeout(NOTICE_SECONDS):
                code, most_kib = await asyncio.shield(child.ended)
        except TimeoutError:
            return _LostProcess("it does not answer")
        detail = describe_exit(code)
        if code in _TIME_SIGNALS:
            return JobEnded("time", detail)
        # The allocator aborts at the job's limit; the kernel kills when the machine has no memory left.
        is_large = most_kib * 1024 > self._memory_bytes // 4
        if code == EXIT_NO_MEMORY or (code in _OUT_OF_MEMORY_SIGNALS and is_large):
            return JobEnded("memory", detail)
        if code >= 0 or code == -9:
            return _LostProcess(detail)
        return JobEnded("crash", detail)

    def _slow_down(self, job: _Job, child: _Child) -> None:
        """The job has run for QUICK_SECONDS. It goes on, or gives way to quick ones."""
        if self._num_processes > 1 and sum(other.is_slow for other in self._running) >= self._max_slow:
            self._kill(child, "slow")
        job.is_slow = True
        self._dispatch()

    def _kill(self, child: _Child, reason: Literal["time", "slow", "abandoned"]) -> None:
        if child.killed_for or self._control is None:
            return
        child.killed_for = reason
        with contextlib.suppress(OSError):  # the server has ended, and its children with it
            self._control.send(COMMAND.pack(KILL, child.number))

    # ── the fork server ──

    def _start(self) -> None:
        """Start the fork server if jobs wait for it."""
        if self._starting is None and self.num_waiting:
            self._starting = asyncio.get_running_loop().create_task(self._start_server())
            self._starting.add_done_callback(self._started)

    def _started(self, starting: "asyncio.Task[None]") -> None:
        self._starting = None
        if starting.cancelled():
            return
        if (error := starting.exception()) is None:
            self._dispatch()
            return
        for queue in (self._quick, self._slow):
            while queue:
                queue.take().result.set_exception(error)

    async def _start_server(self) -> None:
        loop = asyncio.get_running_loop()
        if (wait := self._last_start + RESTART_SECONDS - loop.time()) > 0:
            await asyncio.sleep(wait)
        self._last_start = loop.time()
        ours, theirs = socket.socketpair()
        launch = SandboxLaunch(
            theirs.fileno(), self._module, self._data, self._seconds, self._memory_bytes, self._stack_bytes
        )
        ours.setblocking(False)
        spawning = self._thread.submit(spawn, "octavo.sandbox.fork_server", launch, (theirs.fileno(),), _environment())
        try:
            self._server = await asyncio.wrap_future(spawning)
            theirs.close()
            async with asyncio.timeout(START_SECONDS):
                if not await loop.sock_recv(ours, NOTICE.size):
                    raise OSError("its log has the reason")
        except BaseException as error:
            ours.close()
            theirs.close()
            spawning.add_done_callback(_end_spawned)  # it may still go on
            self._server = None
            if not isinstance(error, OSError):  # TimeoutError is one
                raise
            log.error("the fork server for grammars and templates does not start: %s", error)
            raise EngineUnavailable("the process that compiles grammars and templates does not start", 5) from None
        self._control = ours
        self._notices.clear()
        loop.add_reader(ours, self._read_notices, ours)

    def _read_notices(self, control: socket.socket) -> None:
        try:
            data = control.recv(NOTICE.size * 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_server("it has ended")
            return
        self._notices += data
        while len(self._notices) >= NOTICE.size:
            number, code, most_kib = NOTICE.unpack(self._notices[: NOTICE.size])
            del self._notices[: NOTICE.size]
            child = self._children.pop(number, None)
            if child is None:
                continue
            child.ended.set_result((code, most_kib))
            if child in self._idle:  # ended from outside
                self._idle.remove(child)
                child.channel.close()
                self._dispatch()

    def _lose_server(self, why: str) -> None:
        """Forget a fork server that has ended, and its children, which end with it. The next job starts another. `why`: empty for
        one that is not needed any more."""
        control, self._control = self._control, None
        if control is None:
            return
        with contextlib.suppress(RuntimeError):  # no loop runs: the process is ending
            asyncio.get_running_loop().remove_reader(control)
        control.close()
        for child in self._idle:
            child.channel.close()
        self._idle.clear()
        for child in self._children.values():
            if not child.ended.done():
                child.ended.set_result((-9, 0))
        self._children.clear()
        server, self._server = self._server, None
        assert server is not None
        code = _end(server)
        if why:
            log.error("the fork server for grammars and templates was lost: %s, %s", why, describe_exit(code))
            self._start()


def _environment() -> dict[str, str]:
    """Environment variables for jobs: what Python needs, and no secret that a server may have been given by one."""
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(("PYTHON", "LC_"))}


def _end(server: "subprocess.Popen[bytes]") -> int:
    """Kill a fork server. Returns its exit code."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.stdout.close()
    server.kill()
    return server.wait()


def _end_spawned(spawning: "Future[subprocess.Popen[bytes]]") -> None:
    if not spawning.cancelled() and spawning.exception() is None:
        _end(spawning.result())
