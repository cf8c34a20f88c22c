"""Gives memory back to the system: what was freed, which the C library keeps in pieces for bursts to come, and code that has run.
Knows nothing of who used it."""

import ctypes
import functools
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_ARENA_MAX = -8  # of mallopt(), in malloc.h
_DONTNEED = 4  # of madvise(), in mman.h
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (.{4}) \S+ \S+ \d+ *(.*)$")


def keep_one_heap() -> None:
    """To be called before any thread starts. Otherwise threads get heaps of their own, and of those the end is never given back."""
    if (choose := _of_c("mallopt")) is not None:
        choose(_ARENA_MAX, 1)


def trim_heap() -> None:
    """What hangs together in circles is freed first, in a process of our own: another's heap may take long to look through. Takes
    milliseconds: for times when there is nothing to do. Nothing more happens where the C library has no word for it."""
    if gc.get_freeze_count():
        gc.collect()
    if (trim := _of_c("malloc_trim")) is not None:
        trim(0)


def drop_library_pages() -> None:
    """To be called once the start is over. Most that was read of libraries by then, of torch fifty megabytes, was for the start alone.
    The system keeps it with its files, where it takes nobody's room: what is needed again is there at once."""
    if (advise := _of_c("madvise")) is not None:
        for begin, end in _unwritten():
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def _unwritten() -> Iterator[tuple[int, int]]:
    """Where parts of libraries lie that cannot be written to and never were: code and constants. Libraries stay where they are for as
    long as the process lives. Nothing where the system does not say."""
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return
    begin = end = 0
    sizes: dict[str, str] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if found := _MAPPING.match(line):
            is_fixed = found[3][1] == "-" and found[3][3] == "p" and ".so" in found[4]
            begin, end = (int(found[1], 16), int(found[2], 16)) if is_fixed else (0, 0)
            sizes = {}
        elif end and name in ("Rss", "Anonymous", "Swap"):
            sizes[name] = rest.split()[0]
        # What was written to is the process's own, here or swapped out. Where all is said to be 0, nothing is known.
        if sizes.get("Swap") == sizes.get("Anonymous") == "0" != sizes.get("Rss"):
            yield begin, end
            sizes = {}


@functools.cache
def _of_c(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None
    return found
