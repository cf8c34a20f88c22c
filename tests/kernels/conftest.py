"""Where kernels run: compiled on a GPU, or in Triton's interpreter where there is none."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    if not find_spec("triton"):  # the CPU's native kernels are tested anyway
        return
    from tests.interpreter import mend

    mend(monkeypatch)
