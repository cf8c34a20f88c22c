"""Traces by name: a file of requests, or a recording of `octavo serve`."""

import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from octavo.plan.recorded import trace_of
from octavo.plan.trace import Trace
from octavo.plan.trace_files import read_trace
from octavo.recording.format import read


def load_trace(name: str) -> Trace:
    """A trace, or the requests of a recording."""
    path = Path(name)
    if path.is_dir() or path.suffix in (".segment", ".octavo", ".recording"):
        return recorded_trace(path)
    return read_trace(path)


def recorded_trace(path: Path) -> Trace:
    return trace_of(read(path), anonymous_names())


def anonymous_names() -> Callable[[bytes], int]:
    """Numbers for page keys that say nothing of the keys."""
    salt, names = secrets.token_bytes(16), dict[bytes, int]()

    def rename(key: bytes) -> int:
        if key not in names:
            names[key] = int.from_bytes(blake2b(key, key=salt, digest_size=7).digest())
        return names[key]

    return rename
