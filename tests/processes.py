"""Which processes of this machine there are: for tests and benchmarks that start, stop and kill some.
Knows nothing of what they do."""

import contextlib
from pathlib import Path


def is_alive(pid: int) -> bool:
    """A process that ended and that nobody has asked after yet counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes between opening and reading
        return False


def children_of(pid: int) -> dict[int, str]:
    """Number → command line, whichever thread started them."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            with contextlib.suppress(OSError):
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
    return found
