"""What every test stands on: the CPU, threads that spin briefly, and no leftovers of the person's own environment."""

import os

import pytest

# As in the engine (octavo/engine/build.py); read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
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
