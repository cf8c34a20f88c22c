"""What the pool and its fork server say to each other, and how a job and its reply travel to and from the process that runs it.

The control socket carries commands to the fork server and its notices of processes that ended, all of fixed size. A job has a
socket of its own: the pool makes a pair and passes one end on with the command."""

import struct
from typing import Any, Literal

import msgspec

COMMAND = struct.Struct("<cxxxI")  # FORK or KILL, the number of the child
FORK, KILL = b"F", b"K"
NOTICE = struct.Struct(
    "<IiQ"
)  # the number of the child, how it ended (as subprocess has it), most KiB of memory it had
READY = 0  # instead of a number in the first notice: commands are carried out from now on
LENGTH = struct.Struct("<Q")  # before a job, and before a reply

EXIT_NO_MEMORY = 71  # a job's process had no memory left to say so
EXIT_NO_PROCESS = 72  # instead of a process: the system has none to give

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
