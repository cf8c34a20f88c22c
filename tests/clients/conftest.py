"""One real server on the embedded model for all clients. OCTAVO_PYTHON names the Python that has Octavo, if this one has not."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.servers import Server

# Calls to servers on this machine never go through a proxy.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    python = os.environ.get("OCTAVO_PYTHON", sys.executable)
    options = ("--kv-cache-memory-bytes", "512M", "--api-processes", "1", "--max-num-seqs", "16")
    with Server(*options, python=python) as server:
        yield server.base + "/v1"
