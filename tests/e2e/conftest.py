import gc

import openai
import pytest

from tests.e2e.servers import Server


@pytest.fixture(scope="session")
def server():
    """The embedded model, as `octavo serve` serves it, with two API processes."""
    with Server("--kv-cache-memory-bytes", "512M", "--api-processes", "2", "--max-num-seqs", "64") as server:
        yield server
        server.check_pages()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(autouse=True, scope="module")
def litter():
    """What a file left open is found at its end, not in a file that has nothing to do with it."""
    yield
    gc.collect()
