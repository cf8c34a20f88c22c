"""How much memory is available to this process, and whether memory is scarce: the machine's and its control group's numbers.
Files that a system does not have are skipped."""

from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # control groups of version 1 write "no limit" as a number beyond this


class MemoryReading(NamedTuple):
    available: int  # bytes
    total: int  # bytes: of the machine, or the limit of the control group
    stalled: float  # percent of the last 10 s in which a task waited for memory (PSI); 0 where that is not measured


def read_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> MemoryReading | None:
    """None: this system does not tell."""
    machine = _meminfo(proc / "meminfo")
    if machine is None:
        return None
    available, total = machine
    stalled = _stalled(proc / "pressure" / "memory")
    for folder, limit_name, used_name in _own_groups(proc, groups):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            cached = _file_cache(folder / "memory.stat")
        except (OSError, ValueError):
            continue
        stalled = max(stalled, _stalled(folder / "memory.pressure"))
        if limit_text.isdecimal() and int(limit_text) < _NO_LIMIT:
            limit = int(limit_text)
            available, total = min(available, max(0, limit - used + cached)), min(total, limit)
    return MemoryReading(available, total, stalled)


def _own_groups(proc: Path, groups: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process's control groups, with their parents, which limit it too; (folder, limit, use)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        root, names = groups / controllers, ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if (folder, *names) not in found and folder.is_relative_to(root):
                found.append((folder, *names))
    return found


def _meminfo(path: Path) -> tuple[int, int] | None:
    try:
        lines = path.read_text().splitlines()
        fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return fields["MemAvailable"], fields["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _stalled(path: Path) -> float:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("some "):
                return float(line.split("avg10=")[1].split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _file_cache(stat: Path) -> int:
    """Bytes of a control group's usage that are cached files, which the kernel reclaims on demand."""
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
