"""Descriptors with high numbers, as a process with many connections has them."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def many_descriptors(count: int = 1100) -> Iterator[None]:
    """Every descriptor that is opened inside has a number above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4 * count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * count, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
