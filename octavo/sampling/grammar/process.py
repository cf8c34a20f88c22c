"""Grammar processes, which compute masks. One fork server per rank reads the vocabulary once and forks a process for each grammar.

A grammar is a client's program, and its compiler bounds neither the time of a call nor its stack: a row of the parser is limited
once it is complete, and a call can take minutes, hold Python's lock and block every other matcher of its grammar. So each grammar
has a process of its own. The kernel ends one that uses more processor time than it may (ITIMER_PROF), allocates too much
(RLIMIT_DATA) or overflows its stack, and its rank notices when the socket closes.

Started as `python -m octavo.sampling.grammar.process CONTROL MEMORY`: two inherited descriptors, a socket to the rank and the memory of
its masks."""

import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from octavo.ipc.subprocesses import offer_to_oom_killer, signal_at_parents_end
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.matching import Matching, SharedVocabulary
from octavo.sampling.grammar.protocol import (
    Begin,
    Begun,
    Command,
    Compile,
    End,
    Enter,
    Fill,
    Fork,
    Leave,
    ServerCommand,
    framed,
    receive,
)

# The compiler recurses on chains of references. In 256 KiB of text there is room for chains that take less than 64 MiB.
_STACK_BYTES = 256 * 2**20
_OTHER_STACK_BYTES = 16 * 2**20  # of a thread beside it, which runs only Python
# Exit codes that are kept until the rank asks for them. It asks for those of processes that ended by themselves.
_MAX_ENDED = 256


def main(arguments: list[str]) -> None:
    control, memory = map(int, arguments)
    # The rank's process reacts to these; this one ends when the rank closes its socket.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=control)
    try:
        _serve(line, memory)
    except (EOFError, OSError):  # the rank has ended
        os._exit(0)


def _serve(line: socket.socket, memory: int) -> None:
    begin = msgspec.msgpack.decode(receive(line), type=Begin)
    try:
        import llguidance  # noqa: F401
    except ImportError:
        line.sendall(framed(Begun("llguidance is not installed")))
        return
    shared = SharedVocabulary(begin)
    slots = MaskSlots(begin.vocab_size, begin.num_slots, memory)
    commands = msgspec.msgpack.Decoder[ServerCommand](ServerCommand)
    gc.collect()
    gc.freeze()  # what all processes share is not written to by their collectors
    line.sendall(framed(Begun("")))
    running: set[int] = set()
    ended: OrderedDict[int, int] = OrderedDict()  # process → its exit code
    while True:
        command = commands.decode(receive(line))
        while running and (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            _note_end(*found, running, ended)
        match command:
            case Fork():
                running.add(_fork(line, shared, slots))
            case End(pid):
                if pid in running:
                    os.kill(pid, signal.SIGKILL)
                    _note_end(*os.waitpid(pid, 0), running, ended)
                line.sendall(framed(ended.pop(pid, 0)))


def _note_end(pid: int, status: int, running: set[int], ended: OrderedDict[int, int]) -> None:
    running.discard(pid)
    ended[pid] = os.waitstatus_to_exitcode(status)
    while len(ended) > _MAX_ENDED:
        ended.popitem(last=False)


def _fork(line: socket.socket, shared: SharedVocabulary, slots: MaskSlots) -> int:
    theirs, own = socket.socketpair()
    pid = os.fork()
    if pid:
        own.close()
        socket.send_fds(line, [framed(pid)], [theirs.fileno()])
        theirs.close()
        return pid
    signal_at_parents_end(signal.SIGKILL)
    theirs.close()
    line.close()
    offer_to_oom_killer()
    _limit_memory(shared.begin.memory_bytes)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_run_commands, args=(own, shared, slots))
    thread.start()
    thread.join()
    os._exit(1)  # it never returns


def _run_commands(line: socket.socket, shared: SharedVocabulary, slots: MaskSlots) -> None:
    """Carry out commands until the socket is closed, or an error ends this process: the rank sees both as its end."""
    threading.stack_size(_OTHER_STACK_BYTES)  # of the threads that this one starts
    try:
        commands = msgspec.msgpack.Decoder[Command](Command)
        matching = Matching(shared, slots, _limit_time)
        while True:
            match commands.decode(receive(line)):
                case Compile(grammar):
                    compiled = matching.compile(grammar)
                    line.sendall(framed(msgspec.structs.replace(compiled, num_bytes=_own_bytes())))
                    if compiled.error:
                        os._exit(0)
                case Enter() as command:
                    matching.enter(command)
                case Leave(number):
                    matching.leave(number)
                case Fill() as command:
                    line.sendall(framed(matching.fill(command)))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _limit_time(seconds: float) -> None:
    """Have the kernel end this process with SIGPROF when it has used so much processor time from now on; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(num_bytes: int) -> None:
    """Have allocations fail beyond `num_bytes` more than this process has now; that ends it. Only Linux counts them."""
    if sys.platform != "linux":
        return
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    limit = now + _STACK_BYTES + _OTHER_STACK_BYTES + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _own_bytes() -> int:
    """Bytes of memory that this process has written to and does not share."""
    try:
        sizes = Path("/proc/self/smaps_rollup").read_text()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in sizes.splitlines() if line.startswith("Private_Dirty:")), 0)


if __name__ == "__main__":
    main(sys.argv[1:])
