"""Memory, processor time and open files of the server's processes, under the names that Prometheus' client libraries give them.

They are read from /proc when a scrape asks, for the supervisor, its API processes, the engine and its workers. Processes that
compile one grammar and end are left out: each would be a series of its own."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.observe.metrics.exposition import Labels, Scrape

PROC = Path("/proc")
SUPERVISOR, API = "supervisor", "api"
MODULES = {
    "octavo.server.process": API,
    "octavo.engine.process": "engine",
    "octavo.worker.main": "worker",
    "octavo.cluster.relay": "relay",
    "octavo.cluster.placer": "placer",
}
"""What a process is, by the module that it was started with."""
_MAX_DEPTH = 2  # supervisor → engine → worker
_CPU_FIELD, _START_FIELD, _SIZE_FIELD = (
    11,
    19,
    20,
)  # of /proc/PID/stat, after the name: utime and stime; starttime; vsize and rss


@dataclass(frozen=True, slots=True)
class ProcessState:
    role: str
    pid: int
    cpu_seconds: float
    start_time: float  # seconds since 1970
    virtual_bytes: int
    resident_bytes: int
    num_fds: int | None  # None: it is another user's
    max_fds: int | None  # None: no limit, or another user's

    @property
    def labels(self) -> Labels:
        return {"process": self.role, "pid": str(self.pid)}


def process_metrics(proc: Path = PROC, pid: int | None = None) -> str:
    """The samples of all processes of the server that this API process belongs to. Empty where there is no /proc."""
    own = os.getpid() if pid is None else pid
    states = [state for state in _states(proc, own) if state is not None]
    if not states:
        return ""
    scrape = Scrape({})
    scrape.counter(
        "process_cpu_seconds", "Processor time of the process, in user and system mode.",
        [(state.labels, state.cpu_seconds) for state in states],
    )  # fmt: skip
    for name, help, values in (
        ("process_start_time_seconds", "When the process started, in seconds since 1970.", [s.start_time for s in states]),
        ("process_virtual_memory_bytes", "Address space of the process.", [s.virtual_bytes for s in states]),
        ("process_resident_memory_bytes", "Memory of the process, with pages that it shares.", [s.resident_bytes for s in states]),
        ("process_open_fds", "Open file descriptors, connections among them.", [s.num_fds for s in states]),
        ("process_max_fds", "Most file descriptors that the process may have.", [s.max_fds for s in states]),
    ):  # fmt: skip
        samples = [(state.labels, value) for state, value in zip(states, values, strict=True) if value is not None]
        scrape.gauge(name, help, samples)
    return scrape.text()


def _states(proc: Path, own: int) -> Iterator[ProcessState | None]:
    """A process may end while it is read: it is left out then."""
    supervisor = _parent_of(proc, own)
    if supervisor is None or _role_of(proc, own) is None:
        yield _state(proc, API, own)  # not started by a supervisor: there are no others
        return
    yield _state(proc, SUPERVISOR, supervisor)
    yield from _below(proc, supervisor, _MAX_DEPTH)


def _below(proc: Path, pid: int, depth: int) -> Iterator[ProcessState | None]:
    for child in sorted(_children_of(proc, pid)):
        if (role := _role_of(proc, child)) is not None:
            yield _state(proc, role, child)
            if depth > 1:
                yield from _below(proc, child, depth - 1)


def _state(proc: Path, role: str, pid: int) -> ProcessState | None:
    try:
        fields = _stat(proc, pid)
        (booted,) = [
            int(line.split()[1]) for line in (proc / "stat").read_text().splitlines() if line.startswith("btime ")
        ]
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessState(
        role,
        pid,
        (int(fields[_CPU_FIELD]) + int(fields[_CPU_FIELD + 1])) / ticks,
        booted + int(fields[_START_FIELD]) / ticks,
        int(fields[_SIZE_FIELD]),
        int(fields[_SIZE_FIELD + 1]) * os.sysconf("SC_PAGE_SIZE"),
        _num_fds(proc, pid),
        _max_fds(proc, pid),
    )


def _stat(proc: Path, pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on. The second is the name, which may hold spaces and parentheses."""
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _parent_of(proc: Path, pid: int) -> int | None:
    try:
        return int(_stat(proc, pid)[1])
    except (OSError, ValueError, IndexError):
        return None


def _children_of(proc: Path, pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in (proc / str(pid) / "task").iterdir():
            found |= set(map(int, (task / "children").read_text().split()))
    except (OSError, ValueError):  # it has ended, or the kernel does not list children
        pass
    return found


def _role_of(proc: Path, pid: int) -> str | None:
    """None: it is none of ours, or of no lasting interest."""
    try:
        arguments = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((MODULES[text] for text in arguments if text in MODULES), None)


def _num_fds(proc: Path, pid: int) -> int | None:
    try:
        return len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return None


def _max_fds(proc: Path, pid: int) -> int | None:
    try:
        lines = (proc / str(pid) / "limits").read_text().splitlines()
        (soft,) = [line.split()[3] for line in lines if line.startswith("Max open files")]
        return int(soft)
    except (OSError, ValueError, IndexError):
        return None
