"""Compiles kernels side by side: inside a rehearsal a launch compiles its kernel in a thread instead of running it.
Knows nothing of which kernels: whoever rehearses makes the calls that it will make in earnest."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def warmup(num_threads: int) -> Iterator[None]:
    """Returns when all kernels that were called inside are compiled. Nothing that they would have written is there."""
    in_earnest = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return in_earnest(self, *args, grid=grid, warmup=True, **kwargs)

    # Most of a compilation runs outside Python's lock: in the compiler's own code, or in a process of the assembler.
    with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = in_earnest
