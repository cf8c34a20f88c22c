"""Freed memory and library pages that are no longer used go back to the system."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.ipc.memory_trim import trim_heap


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what it has")


def test_freed_blocks_between_used_ones_go_back() -> None:
    blocks = [bytes(4000) for _ in range(20_000)]  # each too small to go back to the system when it is freed
    kept = blocks[::200]
    full = resident()
    del blocks
    trim_heap()
    assert len(kept) == 100 and full - resident() > 40 * 2**20


OF_A_THREAD = """
import threading
from octavo.ipc.memory_trim import trim_heap, keep_one_heap
from tests.ipc.test_ipc_memory_trim import resident

keep_one_heap()
before, done, stop = resident(), threading.Event(), threading.Event()

def work():  # the thread stays, and with it any heap that is its own
    large = bytes(31 * 2**20)
    del large  # from now on, the C library takes pieces of this size from a heap
    blocks = [b"x" * (2**20 + i) for i in range(40)]
    del blocks
    done.set()
    stop.wait()

threading.Thread(target=work).start()
done.wait()
trim_heap()
print(resident() - before)
stop.set()
"""


def test_memory_freed_by_a_thread_goes_back():
    ran = subprocess.run([sys.executable, "-c", OF_A_THREAD], capture_output=True, text=True)
    assert ran.returncode == 0 and int(ran.stdout) < 8 * 2**20, ran


OF_LIBRARIES = """
import numpy
from octavo.ipc.memory_trim import drop_library_pages
from tests.ipc.test_ipc_memory_trim import resident

def work():
    return float(numpy.linalg.inv(numpy.arange(9.0).reshape(3, 3) + numpy.eye(3)).sum()), sorted({"a": 1})

first, before = work(), resident()
drop_library_pages()
print(before - resident())
assert work() == first
"""


def test_library_pages_are_dropped_and_the_code_runs_again():
    ran = subprocess.run([sys.executable, "-c", OF_LIBRARIES], capture_output=True, text=True)
    assert ran.returncode == 0 and int(ran.stdout) > 2 * 2**20, ran
