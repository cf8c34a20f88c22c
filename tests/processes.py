"""The processes of this machine, for tests and benchmarks that start, stop and kill some."""

import contextlib
import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


def children_of(pid: int) -> dict[int, str]:
    """Process id → command line, for children started by any thread."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            with contextlib.suppress(OSError):
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
    return found


def signal_all(pid: int, number: int) -> None:
    """Send the signal to the process and to all that it has started, as far as they run."""
    tree = [pid]
    for each in tree:
        with contextlib.suppress(OSError):
            tree += children_of(each)
    for each in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
