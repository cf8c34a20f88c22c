"""Batches by the real openai client against a real server, and `octavo run-batch` killed in the middle."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.mortal_api import DEADLY
from tests.e2e.servers import Server
from tests.processes import children_of, is_alive

pytestmark = pytest.mark.model

SMALL = ("--kv-cache-memory-bytes", "128M")


def requests(num_lines: int, max_tokens: int) -> list[dict]:
    """Chats, completions and embeddings in turn; some draw, without a seed of their own."""
    lines = []
    for n in range(num_lines):
        url, body = (
            ("/v1/completions", {"prompt": f"Number {n} is", "max_tokens": max_tokens, "temperature": n % 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"Count from {n}."}],
                                      "max_tokens": max_tokens, "temperature": 0}),
            ("/v1/embeddings", {"input": f"text {n}", "dimensions": 4}),
        )[n % 3]  # fmt: skip
        lines.append({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body})
    return lines


def answers(path: Path) -> dict[str, object]:
    """custom_id → what was answered, without what differs between any two runs. Fails where one is there twice."""
    found: dict[str, object] = {}
    for text in path.read_text().splitlines():
        record = json.loads(text)
        body = record["response"]["body"]
        assert record["custom_id"] not in found and record["response"]["status_code"] == 200, text
        found[record["custom_id"]] = body.get("choices") or body["data"]
    return found


def run_batch(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "octavo.cli.main", "run-batch", *arguments, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_a_run_killed_in_the_middle_goes_on_and_answers_each_line_once(tmp_path):
    source, whole, broken = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests(60, 12)))
    done = run_batch(str(source), str(whole))
    assert done.returncode == 0 and "60 answered, 0 failed" in done.stderr, done.stderr

    command = [sys.executable, "-m", "octavo.cli.main", "run-batch", "-i", str(source), "-o", str(broken), *SMALL]
    running = subprocess.Popen([*command, "--max-concurrency", "3"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not broken.exists() or broken.read_bytes().count(b"\n") < 10:
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    engine = next(iter(children_of(running.pid)))
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    num_before = broken.read_bytes().count(b"\n")
    assert 10 <= num_before < 60
    with broken.open("ab") as file:  # what a write that the kill cut short would leave
        file.write(b'{"id":"batch_req_00')
    again = run_batch("-i", str(source), "-o", str(broken), "--model", "")
    assert again.returncode == 0, again.stderr
    assert f"60 answered, 0 failed, {num_before} of them by earlier runs; {60 - num_before} in" in again.stderr
    assert answers(broken) == answers(whole)
    assert not is_alive(engine)


def test_bad_lines_do_not_stop_the_rest(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [json.dumps(line) for line in requests(3, 2)]
    source.write_text("\n".join([good[0], "{oops", good[1], good[1], good[2].replace("embeddings", "nothing")]))
    done = run_batch(str(source), str(output), "--strict-fields")
    assert done.returncode == 3 and "2 answered, 3 failed" in done.stderr, done.stderr
    records = [json.loads(text) for text in output.read_text().splitlines()]
    assert sorted(record["error"]["line"] for record in records if record["error"]) == [2, 4, 5]
    again = run_batch(str(source), str(output))
    assert again.returncode == 3 and "; 0 in " in again.stderr
    assert [json.loads(text) for text in output.read_text().splitlines()] == records


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="x", max_retries=0, timeout=60)


def test_batches_by_the_openai_client(tmp_path):
    """Two API processes, which share one folder; the server ends in the middle, and the next one on that folder goes on."""
    lines = [line for line in requests(90, 8) if line["url"] == "/v1/chat/completions"]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    flags = (*SMALL, "--files-folder", str(tmp_path / "files"), "--api-processes", "2", "--batch-concurrency", "2")
    with Server(*flags) as server, openai_client(server) as client:
        file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        assert client.files.content(file.id).read() == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        while (now := client.batches.retrieve(batch.id)).request_counts.completed < 3:
            assert now.status in ("validating", "in_progress"), now
            time.sleep(0.05)
        dropped = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert client.batches.cancel(dropped.id).status in ("cancelling", "cancelled")
        assert server.terminate() == 0, server.lines
    with Server(*flags) as server, openai_client(server) as client:
        deadline = time.monotonic() + 90
        while (now := client.batches.retrieve(batch.id)).status != "completed":
            assert now.status in ("in_progress", "finalizing") and time.monotonic() < deadline, now
            time.sleep(0.1)
        assert (now.request_counts.total, now.request_counts.completed, now.request_counts.failed) == (30, 30, 0)
        output = [json.loads(text) for text in client.files.content(now.output_file_id).text.splitlines()]
        assert sorted(record["custom_id"] for record in output) == sorted(line["custom_id"] for line in lines)
        assert all(record["response"]["body"]["choices"][0]["message"]["content"] for record in output)
        assert {item.id for item in client.batches.list(limit=1)} == {batch.id, dropped.id}  # two pages of one
        while client.batches.retrieve(dropped.id).status != "cancelled":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert server.wait_until_idle() == (0, 0, 0)


def test_a_line_that_ends_api_processes_is_failed_alone(tmp_path):
    """After one end with its neighbour in flight, where there was one, and two alone."""
    lines = [line for line in requests(18, 6) if line["url"] == "/v1/completions"]
    lines[2]["body"]["prompt"] = f"The {DEADLY} is"
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    flags = (*SMALL, "--files-folder", str(tmp_path / "files"), "--api-processes", "2", "--batch-concurrency", "2")
    with Server(*flags, module="tests.e2e.mortal_api") as server, openai_client(server) as client:
        file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline, server.lines
            try:
                if (now := client.batches.retrieve(batch.id)).status == "completed":
                    break
            except openai.APIConnectionError:
                pass  # the process that had this connection has ended
            time.sleep(0.1)
        assert (now.request_counts.total, now.request_counts.completed, now.request_counts.failed) == (6, 5, 1)
        (failed,) = (json.loads(text) for text in client.files.content(now.error_file_id).text.splitlines())
        assert failed["custom_id"] == lines[2]["custom_id"] and failed["response"] is None
        assert failed["error"]["code"] == "request_ended_server" and "twice" in failed["error"]["message"]
        assert json.loads(server.get("/health/progress")[1])["api_restarts"] in (2, 3), server.lines
        assert server.terminate() == 0, server.lines
