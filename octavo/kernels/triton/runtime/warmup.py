"""Compile kernels in parallel: inside warmup() a launch compiles its kernel in a thread instead of running it. The caller
makes the same calls that it will make later."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def warmup(num_threads: int) -> Iterator[None]:
    """Compile all kernels launched inside, and wait for them on exit. The kernels do not run, so their outputs are not
    written."""
    in_earnest = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return in_earnest(self, *args, grid=grid, warmup=True, **kwargs)

    # Most of a compilation runs without the GIL, in the compiler's C++ code or in an assembler process.
    with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = in_earnest
