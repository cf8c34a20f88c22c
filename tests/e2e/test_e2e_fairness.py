"""One request with thousands of sequences, on a real server: others are served beside it all the same."""

import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.servers import Server

SOON = 15.0
"""Seconds: more than ten times what it takes on two busy cores. Everything that the large requests ask for takes many minutes."""


@contextmanager
def beside(server: Server, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request whose client disconnects at the end."""
    address = urllib.parse.urlsplit(server.base)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + data)
        yield
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # no answer yet
            connection.recv(1)


def seconds_for_a_token(server: Server) -> float:
    started = time.monotonic()
    status, text = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
    assert status == 200, text
    return time.monotonic() - started


def test_a_request_for_too_much_is_refused_at_once(server: Server) -> None:
    started = time.monotonic()
    status, text = server.post("/v1/completions", {"prompt": ["Hi"] * 1024, "n": 64, "max_tokens": 16})
    assert status == 400 and "65536 sequences" in text and "--max-request-sequences" in text
    assert time.monotonic() - started < SOON


@pytest.mark.parametrize(("num_prompts", "n"), [(1024, 4), (32, 128)])
def test_a_bystander_is_served_beside_thousands_of_sequences(server: Server, num_prompts: int, n: int) -> None:
    seconds_for_a_token(server)
    body = {"prompt": ["Hi"] * num_prompts, "n": n, "max_tokens": 2000, "ignore_eos": True}
    with beside(server, "/v1/completions", body):
        server.wait_until_running(60)
        times = [seconds_for_a_token(server) for _ in range(6)]
        running, waiting, _ = server.in_use()
        assert running > 60 and waiting > 0, "the engine is full all the while"
        assert max(times) < SOON, times
    assert server.wait_until_idle(60) == (0, 0, 0)


def test_a_bystander_is_served_beside_thousands_of_embeddings(server: Server) -> None:
    text = "All sequences of one request take turns with those of others. " * 12
    with beside(server, "/v1/embeddings", {"input": [f"{number} {text}" for number in range(2048)]}):
        deadline = time.monotonic() + 60
        while not server.in_use()[1]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        times = [seconds_for_a_token(server) for _ in range(6)]
        assert server.in_use()[1] > 0 and max(times) < SOON, times
    assert server.wait_until_idle(60) == (0, 0, 0)
