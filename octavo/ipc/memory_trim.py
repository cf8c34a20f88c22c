"""Gives memory back to the system: freed memory that the C library keeps, and pages of libraries that only the start needed."""

import ctypes
import functools
import gc
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_ARENA_MAX = -8  # M_ARENA_MAX of mallopt(), in malloc.h
_PAGE = mmap.PAGESIZE
_DONTNEED = 4  # MADV_DONTNEED of madvise(), in mman.h
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (.{4}) \S+ \S+ \d+ *(.*)$")


def keep_one_heap() -> None:
    """Use one malloc arena for all threads. To be called before any thread starts: malloc_trim() never returns the top of the
    arenas that threads get otherwise."""
    if (choose := _libc("mallopt")) is not None:
        choose(_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can. Takes milliseconds, so it is for idle times. Collects reference
    cycles first, but only in our own processes, which have frozen their heap: a user's heap may take long to traverse."""
    if gc.get_freeze_count():
        gc.collect()
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


def drop_library_pages() -> None:
    """madvise(MADV_DONTNEED) on clean library pages after start-up: about 50 MB of torch is not used again. A page that is needed
    again faults back from the page cache."""
    if (advise := _libc("madvise")) is not None:
        for begin, end in _clean_ranges():
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def give_back_range(begin: int, num_bytes: int) -> None:
    """Return the whole system pages within this range of private, anonymous memory to the system. They read as zero afterwards."""
    first = -(-begin // _PAGE) * _PAGE
    last = (begin + num_bytes) // _PAGE * _PAGE
    if last > first and (advise := _libc("madvise")) is not None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)


def _clean_ranges() -> Iterator[tuple[int, int]]:
    """Address ranges of libraries that are read-only and were never written: code and constants. A library stays mapped for as
    long as the process lives, so the ranges stay valid. Empty where the system has no /proc/self/smaps."""
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
        # Written pages are the process's own (Anonymous, or Swap if swapped out). Rss 0: nothing resident, or not reported.
        if sizes.get("Swap") == sizes.get("Anonymous") == "0" != sizes.get("Rss"):
            yield begin, end
            sizes = {}


@functools.cache
def _libc(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None
    return found
