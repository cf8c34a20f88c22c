"""Messages between the pool and its fork server, and the framing of a job and its reply.

The control socket carries commands to the fork server and its notices of processes that ended, all of fixed size. A job has a
socket of its own: the pool makes a pair and passes one end on with the command."""

import struct
from typing import Any, Literal

import msgspec

COMMAND = struct.Struct("<cxxxI")  # FORK or KILL, the number of the child
FORK, KILL = b"F", b"K"
# The number of the child, its exit code (negative: a signal), the most KiB of memory that it had.
NOTICE = struct.Struct("<IiQ")
READY = 0  # instead of a number in the first notice: commands are carried out from now on
LENGTH = struct.Struct("<Q")  # before a job, and before a reply

EXIT_NO_MEMORY = 71  # of a job's process that had too little memory left to send a reply
EXIT_NO_PROCESS = 72  # instead of an exit code: fork failed, because the system has no process or memory left

Status = Literal["done", "refused", "no_memory", "failed"]


class SandboxLaunch(msgspec.Struct, frozen=True):
    """Start-up parameters of a fork server."""

    control_fd: int  # inherited socket
    module: str  # has prepare(data), which returns the jobs by name
    data: bytes  # for prepare()
    seconds: float  # of CPU time for a job
    memory_bytes: int  # for a job
    stack_bytes: int  # for a job's thread


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What became of a job. It is decoded by the pool's process, which does not trust it."""

    status: Status
    value: Any = None  # the result; for "refused" the error's data, for "failed" a traceback
