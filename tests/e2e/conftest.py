import pytest

from tests.e2e.servers import Server


@pytest.fixture(scope="session")
def server():
    """The embedded model, as `octavo serve` serves it, with two API processes."""
    with Server("--kv-cache-memory-bytes", "512M", "--api-processes", "2", "--max-num-seqs", "64") as server:
        yield server
        server.check_pages()
