"""Gives freed memory back to the system: the C library keeps what a burst of work took, in pieces, for bursts to come.
Knows nothing of who used it."""

import ctypes
import functools
import gc
from collections.abc import Callable

_ARENA_MAX = -8  # of mallopt(), in malloc.h


def keep_one_heap() -> None:
    """To be called before any thread starts. Otherwise threads get heaps of their own, and of those the end is never given back."""
    if (choose := _of_c("mallopt")) is not None:
        choose(_ARENA_MAX, 1)


def give_back() -> None:
    """What hangs together in circles is freed first, in a process of our own: another's heap may take long to look through. Takes
    milliseconds: for times when there is nothing to do. Nothing more happens where the C library has no word for it."""
    if gc.get_freeze_count():
        gc.collect()
    if (trim := _of_c("malloc_trim")) is not None:
        trim(0)


@functools.cache
def _of_c(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None
    return found
