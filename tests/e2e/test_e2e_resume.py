"""A stream whose connection is really cut, read on through whichever API process answers; and a prompt's progress."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server

RESUME_SECONDS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        "--api-processes", "2", "--resume-seconds", str(RESUME_SECONDS), "--kv-cache-memory-bytes", "192M",
        "--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
    ) as server:  # fmt: skip
        yield server


def connect(server: Server, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    address = urllib.parse.urlsplit(server.base)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), {"Connection": "close"})
    return connection.getresponse()


def cut(response: http.client.HTTPResponse) -> None:
    """As a network does it: no goodbye, what was under way is lost."""
    with socket.socket(fileno=os.dup(response.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
        response.close()


def read_events(response: http.client.HTTPResponse, limit: int | None = None) -> dict[int, str]:
    """Number → data, to the end or until there are so many."""
    found: dict[int, str] = {}
    while limit is None or len(found) < limit:
        number = response.readline()
        if not number:
            break
        data = response.readline()
        assert response.readline() == b"\n"
        found[int(number.removeprefix(b"id: "))] = data.decode().removeprefix("data: ").rstrip("\n")
    return found


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": "Once upon a time", "max_tokens": num_tokens, "seed": 5, "temperature": 0.8, "ignore_eos": True,
        "stream": True, "stream_options": {"resumable": True}, **fields,
    }  # fmt: skip


def text_of(events: dict[int, str]) -> str:
    assert [*events] == [*range(len(events))] and events[len(events) - 1] == "[DONE]"
    return "".join(json.loads(data)["choices"][0]["text"] for data in [*events.values()][:-1])


def test_a_connection_that_was_cut(server: Server) -> None:
    whole = text_of(read_events(connect(server, "POST", "/v1/completions", body(120))))
    assert len(whole) > 100
    for _ in range(2):  # connections are dealt out in turn: this one and the next reach both processes
        response = connect(server, "POST", "/v1/completions", body(120))
        stream_id = response.headers["x-stream-id"]
        assert re.fullmatch("cmpl-[0-9a-f]{32}", stream_id)
        events = read_events(response, 7)
        while "[DONE]" not in events.values():
            cut(response)
            response = connect(server, "GET", f"/v1/stream/{stream_id}?from={len(events)}")
            assert response.status == 200
            events |= read_events(response, 60)
        assert text_of(events) == whole
        connect(server, "GET", "/health").read()  # so that the next round begins at the other process
    assert server.wait_until_idle() == (0, 0, 0)


def api_processes(server: Server) -> list[int]:
    return [pid for pid, command in server.children().items() if command.endswith("server.process")]


def chat_of(num_tokens: int) -> dict[str, Any]:
    """Two choices without a seed: what another process makes of it must not be drawn anew."""
    fields = {"messages": [{"role": "user", "content": "Tell me a story."}], "n": 2, "temperature": 0.9}
    return {
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"resumable": True},
        **fields,
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_outlives_its_api_process(server: Server, path: str) -> None:
    """Both processes are killed, one after the other has come back: the second one takes the stream over, and then a third."""
    response = connect(server, "POST", path, body(150) if path == "/v1/completions" else chat_of(100))
    stream_id = response.headers["x-stream-id"]
    events = read_events(response, 20)
    for _ in range(2):
        (maker,) = [pid for pid in api_processes(server) if stream_id in _locked_by(pid)]
        os.kill(maker, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while True:
            try:
                response = connect(server, "GET", f"/v1/stream/{stream_id}")
                break
            except OSError:  # it was that process's turn to answer
                assert time.monotonic() < deadline
        assert response.status == 200, response.read()
        again = read_events(response, len(events) + 20)
        assert [*again.items()][: len(events)] == [*events.items()], "to the byte"
        events = again
        cut(response)
    response = connect(server, "GET", f"/v1/stream/{stream_id}?from={len(events)}")
    events |= read_events(response)
    assert [*events] == [*range(len(events))] and events[len(events) - 1] == "[DONE]"
    if path == "/v1/completions":
        assert text_of(events) == text_of(read_events(connect(server, "POST", "/v1/completions", body(150))))
    else:
        ends = [choice["finish_reason"] for data in [*events.values()][:-1] for choice in json.loads(data)["choices"]]
        assert sorted(filter(None, ends)) == ["length", "length"]
    assert connect(server, "DELETE", f"/v1/stream/{stream_id}").status == 200
    assert connect(server, "GET", f"/v1/stream/{stream_id}").status == 404
    assert server.wait_until_idle() == (0, 0, 0)


def _locked_by(pid: int) -> str:
    """The names of files that a process has open."""
    names = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(file))
    return " ".join(names)


def test_a_client_that_does_not_come_back_ends_its_request(server: Server) -> None:
    before = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    response = connect(server, "POST", "/v1/completions", body(1950, n=4, use_speculation=False))
    read_events(response, 3)
    cut(response)
    assert server.in_use()[0] == 4, "it goes on for a while"
    assert server.wait_until_idle(60) == (0, 0, 0)
    assert server.metric("vllm:request_success_total", 'finished_reason="abort"') == before + 4
    status = connect(server, "GET", f"/v1/stream/{response.headers['x-stream-id']}").status
    assert status == 404


def test_progress_of_a_prompt_in_chunks_and_from_the_cache(server: Server) -> None:
    def progress(num_tokens: int) -> list[tuple[int, int, int]]:
        fields = {"prompt": [1000 + at for at in range(num_tokens)], "stream_options": {"include_progress": True}}
        response = connect(server, "POST", "/v1/completions", body(2, **fields))
        chunks = [json.loads(data[6:]) for data in response.read().decode().split("\n\n")[:-2]]
        reported = [tuple(chunk["prompt_progress"].values()) for chunk in chunks if "prompt_progress" in chunk]
        assert all("prompt_progress" in chunk for chunk in chunks[: len(reported)]), "before the first token"
        return reported

    for steps in (
        [(200, 64, 0), (200, 128, 0), (200, 192, 0), (200, 200, 0)],
        [(300, 256, 192), (300, 300, 192)],
    ):
        reported = progress(steps[-1][0])
        # A server that has no time for each step tells the newest.
        assert reported == [step for step in steps if step in reported] and reported[-1] == steps[-1]
