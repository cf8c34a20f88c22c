"""Setup for every test: the CPU, threads that spin briefly, and no settings from the user's own environment."""

import contextlib
import gc
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.observe.step_observer import DROPPED

# As in the engine (octavo/engine/build.py); read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# Tests run in parallel and share the cores; an engine's number of threads is the same as for a user.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))
# Calls to servers on this machine never go through a proxy, and those servers ask for no key.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ.pop("OCTAVO_API_KEY", None)


def pytest_configure(config):
    """Hide the GPU unless the tests for one are selected: `pytest -m gpu`."""
    if hasattr(config, "workerinput"):
        # The system shares cores among sessions, and each server that is tested has one: so has each process with clients.
        with contextlib.suppress(OSError):
            os.setsid()
    if config.getoption("markexpr", "") in ("", "not gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported: kernels run on the CPU
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Collecting makes millions of objects that stay, which the garbage collector would scan again and again. In a fresh clone pytest
    compiles every test file: of two processes the second begins with the last files, so that each compiles half."""
    gc.disable()
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        return
    for argument in reversed(session.config.args):
        for path in sorted(Path(argument).rglob("test_*.py"), reverse=True):
            sys.path.insert(0, str(path.parent))  # as pytest does
            with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest's own import comes later, and says it
                importlib.import_module(path.stem)
            sys.path.remove(str(path.parent))


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here; on one: pytest -m gpu"))


def pytest_collection_finish():
    """Freeze the imported objects, so that the garbage collector does not scan them either; and let it scan the others rarely, as
    our own processes do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def no_dropped_observers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which an observer raised: the engine goes on without it, so that nothing else would show the fault."""
    dropped: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.msg == DROPPED:
            dropped.append(record.getMessage())
        return True

    log = logging.getLogger("octavo.engine")
    log.addFilter(note)
    yield
    log.removeFilter(note)
    assert not dropped or request.node.get_closest_marker("drops_observers"), dropped


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A short folder for temporary files: if the path is long, as tmp_path may be, a server puts its sockets elsewhere."""
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        yield Path(folder)
