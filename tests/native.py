"""The CPU's native kernels for tests: one pool of threads for all of them. Tests that need them are skipped where they are missing."""

import functools

import pytest

from octavo.kernels.cpu.build import THIS_MACHINE, NoCompiler
from octavo.kernels.cpu.native import Native

# Of this machine. A test skips those that its CPU lacks.
ISAS = {"x86_64": ["avx512vnni", "avx2", "portable"], "aarch64": ["i8mm", "dotprod", "neon", "portable"]}.get(
    THIS_MACHINE, ["portable"]
)


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
