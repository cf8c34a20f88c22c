"""A seccomp filter for a process that computes: it may use its memory, its threads and its open descriptors, and nothing else.

Every other system call fails with EPERM: no file is opened, no socket is made, no program is run, no process is created. Linux on
x86-64 and ARM64 only."""

import ctypes
import errno
import os
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # opcodes of classic BPF
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_CLONE3 = 435  # on both; its flags are in memory, where a filter cannot look

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int, int]] = {  # numbers on x86-64 and ARM64
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "rseq": (334, 293),
}
_CLONE, _TGKILL = (56, 220), (234, 131)  # allowed with the right first argument


def restrict_system_calls() -> bool:
    """Install the filter for this thread and those it starts. It cannot be removed. False: this system has none."""
    machine = platform.machine() if sys.platform == "linux" else ""
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return False
    program = _program(_ARCHITECTURES[machine], at=list(_ARCHITECTURES).index(machine))
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and their address
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0) == 0)


def _program(architecture: int, at: int) -> bytes:
    """The filter as BPF instructions. `at`: the architecture's column in the tables."""

    def instruction(opcode: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", opcode, if_true, if_false, value)

    refuse = instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = instruction(_RETURN, _ALLOW)
    first = instruction(_LOAD, _FIRST_ARGUMENT)
    code = [instruction(_LOAD, _ARCH), instruction(_JUMP_EQUAL, architecture, if_true=1), refuse]
    code.append(instruction(_LOAD, _NUMBER))
    for numbers in _CALLS.values():
        code += [instruction(_JUMP_EQUAL, numbers[at], if_false=1), allow]
    # Threads, but no processes. Without clone3 the C library uses clone.
    code += [instruction(_JUMP_EQUAL, _CLONE3, if_false=1), instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [instruction(_JUMP_EQUAL, _CLONE[at], if_false=4), first]
    code += [instruction(_JUMP_ANY_BIT, _CLONE_THREAD, if_false=1), allow, refuse]
    # abort() signals its own process.
    code += [instruction(_JUMP_EQUAL, _TGKILL[at], if_false=4), first]
    code += [instruction(_JUMP_EQUAL, os.getpid(), if_false=1), allow, refuse]
    code.append(refuse)
    return b"".join(code)
