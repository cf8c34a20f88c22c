"""Journeys of a real server whose pages run out, asked for at either of its API processes; and a server without a log."""

import concurrent.futures
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.servers import START_LIMIT_S, Server

NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Room for some of the answers only."""
    arguments = ("--max-model-len", "512", "--kv-cache-memory-bytes", "12M", "--api-processes", "2")
    with Server(*arguments, "--enable-log-requests", "--log-format", "json") as server:
        yield server


@pytest.fixture(scope="module")
def answers(small: Server) -> list[tuple[dict[str, Any], float]]:
    """Each answer, and how long its client waited for it."""

    def ask(number: int) -> tuple[dict[str, Any], float]:
        # Drawn, not greedy: a greedy answer repeats itself, speculation ends it early, and its pages come free too soon.
        body = {"prompt": f"A story, number {number}:", "max_tokens": 200, "ignore_eos": True, "seed": number}
        started = time.monotonic()
        status, text = small.post("/v1/completions", body, **{"X-Request-Id": f"story-{number}"})
        assert status == 200, text
        return json.loads(text), time.monotonic() - started

    # Each API process twice: its first request meets code that has not run yet, before any journey begins.
    for _ in range(4):
        assert small.post("/v1/completions", {"prompt": "A", "max_tokens": 1})[0] == 200
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(ask, range(NUM_REQUESTS)))


def journey_of(server: Server, request_id: str) -> dict[str, Any]:
    """As soon as it is kept: its last byte is out a moment before that."""
    for _ in range(100):
        status, text = server.get(f"/v1/requests/{request_id}")
        if status == 200 and json.loads(text)["state"] == "finished":
            return dict(json.loads(text))
        time.sleep(0.02)
    raise AssertionError(text)


def test_stage_times_sum_to_what_the_client_waited(small: Server, answers: list[tuple[dict[str, Any], float]]) -> None:
    gaps = []
    for number, (_, seconds) in enumerate(answers):
        journey = journey_of(small, f"story-{number}")
        total = sum(stage["end"] - stage["start"] for stage in journey["stages"])
        assert total == pytest.approx(journey["seconds"], abs=1e-4)
        # The last stage ends when the server has noted that the last byte left; the client may already have it by then.
        assert total <= seconds + 0.05
        gaps.append((seconds - total) / seconds)
    # Time that no stage names would be missing from all; a client's thread that the system runs late is one of many.
    assert statistics.median(gaps) < 0.02, gaps


def test_preempted_requests_tell_their_story(small: Server, answers: list[tuple[dict[str, Any], float]]) -> None:
    journeys = [journey_of(small, f"story-{number}") for number in range(NUM_REQUESTS)]
    preempted = [journey for journey in journeys if journey["preemptions"]]
    assert preempted, "pages were to run out"
    assert sum(journey["preemptions"] for journey in journeys) == small.metric("vllm:num_preemptions_total")
    for journey in preempted:
        stages = journey["stages"]
        assert sum(stage.get("output_tokens", 0) for stage in stages) == journey["output_tokens"] == 200
        left = [stage for stage in stages if stage["name"] == "preempted"]
        again = [stage for stage in stages if stage["name"] == "recompute"]
        assert len(left) == len(again) == journey["preemptions"]
        known = journey["prompt_tokens"]
        for stage in stages:
            if stage["name"] == "recompute":
                assert stage.get("cached_tokens", 0) + stage["computed_tokens"] == known
            known += stage.get("output_tokens", 0)
        for stage in left:
            assert stage["dropped_tokens"] > 0
            assert sum(wait["seconds"] for wait in stage["waits"]) == pytest.approx(
                stage["end"] - stage["start"], abs=1e-4
            )
            assert {wait["reason"] for wait in stage["waits"]} & {"pages", "order"}


def test_any_api_process_knows_them_all(small: Server, answers: list[tuple[dict[str, Any], float]]) -> None:
    owners = {journey_of(small, f"story-{number}")["api_process"] for number in range(NUM_REQUESTS)}
    assert owners == {0, 1}
    for _ in range(4):  # each connection goes to the next of them
        for number, (answer, _) in enumerate(answers):
            assert json.loads(small.get(f"/v1/requests/{answer['id']}")[1])["id"] == f"story-{number}"
        status, text = small.get("/v1/requests?state=finished")
        assert status == 200 and {f"story-{n}" for n in range(NUM_REQUESTS)} <= {
            j["id"] for j in json.loads(text)["data"]
        }
    assert small.get("/v1/requests/nobody")[0] == 404


def test_one_json_line_for_each_request(small: Server, answers: list[tuple[dict[str, Any], float]]) -> None:
    journey_of(small, f"story-{NUM_REQUESTS - 1}")
    deadline = time.monotonic() + 10
    while True:
        lines = [json.loads(line) for line in small.lines if line.startswith("{")]
        stories = {line["id"]: line for line in lines if line.get("id", "").startswith("story-")}
        if len(stories) == NUM_REQUESTS or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert len(stories) == NUM_REQUESTS
    for line in stories.values():
        assert line["output_tokens"] == 200 and line["finish_reasons"] == ["length"] and line["status"] == 200
        assert sum(line["stages"].values()) == pytest.approx(line["seconds"], abs=1e-3)
    assert "A story" not in "\n".join(small.lines)


def test_a_full_disk_under_the_log_is_no_reason_to_stop() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", str(port), "--max-model-len", "256"]
    full = os.open("/dev/full", os.O_WRONLY)
    # Of a variable that is not known the start says so, before anything else.
    environment = {**os.environ, "OCTAVO_NO_SUCH_FLAG": "1"}
    process = subprocess.Popen([*command, "--enable-log-requests"], stderr=full, env=environment)
    os.close(full)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
                    assert response.status == 200
                    break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()
        for _ in range(3):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 4
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
