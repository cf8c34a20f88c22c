"""The CPU's native kernels for tests: one pool of threads for all of them. Tests that need them are skipped where they are missing."""

import functools

import pytest

from octavo.kernels.cpu.build import NoCompiler
from octavo.kernels.cpu.native import Native


@functools.cache
def _native(num_threads: int) -> Native | str:
    try:
        return Native(num_threads)
    except NoCompiler as error:
        return str(error)


def native(num_threads: int = 2) -> Native:
    found = _native(num_threads)
    if isinstance(found, str):
        pytest.skip(f"no native kernels: {found}")
    return found
