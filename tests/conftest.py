"""What every test stands on: the CPU, threads that spin briefly, and no leftovers of the person's own environment."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# As in the engine (octavo/engine/build.py); read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# Processes of tests share the cores; an engine's own number of threads is what it is for a user.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))
# Calls to servers on this machine never go through a proxy, and those servers ask for no key.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ.pop("OCTAVO_API_KEY", None)


def pytest_configure(config):
    """A GPU is for the tests that ask for one: `pytest -m gpu`."""
    if config.getoption("markexpr", "") in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported: kernels run on the CPU
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here; on one: pytest -m gpu"))


def pytest_collection_finish():
    """What was imported stays: the collector, which would look through it again and again, leaves it alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For temporary files: where a path is long, as that of tmp_path may be, a server's sockets lie elsewhere."""
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        yield Path(folder)
