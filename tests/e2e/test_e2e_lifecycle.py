"""Starting, stopping and starting again; and starts that must fail with one line."""

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.weights.sources.source import resolve
from tests.e2e.servers import Server
from tests.processes import children_of, is_alive

pytestmark = pytest.mark.model


def stream_story(server: Server, num_tokens: int, into: list[str]) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    into.append(server.post("/v1/completions", body)[1])


def stream_to_its_end(server: Server) -> None:
    """Whatever that end is."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        stream_story(server, 4000, [])


def test_sigterm_finishes_what_runs_and_a_new_server_takes_the_port():
    answers: list[str] = []
    with Server("--kv-cache-memory-bytes", "256M") as server:
        port = server.base.rsplit(":", 1)[1]
        threads = [threading.Thread(target=stream_story, args=(server, 400, answers)) for _ in range(6)]
        for thread in threads:
            thread.start()
        server.wait_until_running(6)
        assert server.terminate() == 0, server.lines
        for thread in threads:
            thread.join()
    assert len(answers) == 6 and all(answer.rstrip().endswith("data: [DONE]") for answer in answers)
    assert all('"finish_reason":"length"' in answer.replace(" ", "") for answer in answers)
    with Server("--kv-cache-memory-bytes", "256M", "--port", port) as again:
        assert again.base.endswith(f":{port}")
        assert again.get("/health")[0] == 200
        assert again.in_use() == (0, 0, 0)


def test_without_restarts_a_killed_engine_ends_streams_with_an_error_and_the_server_with_code_1():
    answers: list[str] = []
    with Server("--kv-cache-memory-bytes", "256M", "--max-engine-restarts", "0") as server:
        thread = threading.Thread(target=stream_story, args=(server, 2000, answers))
        thread.start()
        server.wait_until_running(1)
        os.kill(server.engine(), signal.SIGKILL)
        thread.join(60)
        assert '"error"' in answers[0] and "engine" in answers[0] and "--max-engine-restarts is 0" in answers[0]
        assert server.process.wait(30) == 1
    assert any("killed by SIGKILL" in line for line in server.lines)


def test_what_does_not_finish_in_time_gets_an_error_and_the_exit_code_shows_it():
    answers: list[str] = []
    with Server("--kv-cache-memory-bytes", "256M", "--shutdown-timeout", "0.2") as server:
        thread = threading.Thread(target=stream_story, args=(server, 4000, answers))
        thread.start()
        server.wait_until_running(1)
        assert server.terminate() == 3, server.lines
        thread.join()
    assert '"code":"engine_unavailable"' in answers[0] and answers[0].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_second_signal_stops_it_now_even_if_its_engine_cannot(short_path, is_stopped):
    with Server("--kv-cache-memory-bytes", "256M", environment={"TMPDIR": str(short_path)}) as server:
        assert list(short_path.glob("octavo-*"))
        children = server.children()
        thread = threading.Thread(target=stream_to_its_end, args=(server,))
        thread.start()
        server.wait_until_running(1)
        if is_stopped:
            os.kill(server.engine(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        while server.get("/health/ready")[0] == 200:  # the signal is on its way
            time.sleep(0.01)
        assert server.terminate(10) == 130
        thread.join()
        assert not any(map(is_alive, children)) and not list(short_path.glob("octavo-*"))


@pytest.mark.parametrize("stopped", ["none", "engine.process", "server.process"])
def test_nothing_outlives_a_killed_supervisor(short_path, stopped):
    """No process, and no folder of sockets."""
    with Server("--kv-cache-memory-bytes", "256M", environment={"TMPDIR": str(short_path)}) as server:
        assert list(short_path.glob("octavo-*"))
        children = server.children()
        assert len(children) == 2
        for pid, command in children_of(server.process.pid).items():
            if command.endswith(stopped):
                os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 20
        while (any(map(is_alive, children)) or list(short_path.glob("octavo-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, children))
        assert not list(short_path.glob("octavo-*"))


def test_the_api_key_covers_every_route_but_health_and_a_long_path_for_temporary_files_is_no_obstacle(tmp_path):
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    environment = {"OCTAVO_API_KEY": "sesame", "TMPDIR": str(deep)}
    with Server("--kv-cache-memory-bytes", "256M", environment=environment) as server:
        assert server.get("/health")[0] == 200
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            status, text = server.get(path)
            assert status == 401 and "API key" in json.loads(text)["error"]["message"], path
        assert server.get("/v1/models", Authorization="Bearer sesame")[0] == 200
        assert len(server.children()) >= 2
        for pid, command in server.children().items():
            assert "sesame" not in command and b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert not any("sesame" in line for line in server.lines)


def tell_stories(
    server: Server, count: int, fault: Callable[[], None] | None = None, max_tokens: int = 40
) -> list[str]:
    """Texts: greedy and sampled by turns, all at once."""
    bodies = [
        {
            "prompt": f"Tale {number}: once upon a time",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": number,
            "temperature": t,
        }
        for number, t in zip(range(count), itertools.cycle((0, 0.9)), strict=False)
    ]
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        if fault is not None:
            server.wait_until_running(count)
            fault()
        results = [answer.result() for answer in answers]
    assert all(status == 200 for status, _ in results), results
    return [json.loads(text)["choices"][0]["text"] for _, text in results]


@pytest.mark.parametrize(("flag", "size"), [("--tensor-parallel-size", 3), ("--pipeline-parallel-size", 2)])
def test_what_several_ranks_say_is_the_same_when_one_is_killed(flag, size):
    """SmolLM2 has three KV heads: three ranks share it."""
    with Server("--kv-cache-memory-bytes", "256M", flag, str(size)) as server:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        status, text = server.post("/v1/completions", body)
        assert status == 200 and "Paris" in text, text
        num = 12 if size > 2 else 40  # three ranks on two cores take long for a step
        untroubled = tell_stories(server, 5, max_tokens=num)
        ranks = list(children_of(server.engine()))
        assert len(ranks) == size
        assert tell_stories(server, 5, lambda: os.kill(ranks[1], signal.SIGKILL), num) == untroubled
        assert not any(map(is_alive, ranks))
        assert server.metric("octavo:restarts_total", 'process="engine",cause="failed"') == 1
        assert server.terminate() == 0, server.lines


def fail_to_serve(*arguments: str) -> str:
    """The one line that a start-up mistake prints."""
    resolve("")  # fetched now, if it must be: the progress is not part of the mistake
    done = subprocess.run(
        # Without a recorder, which tells of what a server that was killed has left: another test's may be.
        [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", "--record-bytes", "0", *arguments],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr and len(lines) == 1, done.stderr
    return lines[0]


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in fail_to_serve("--port", str(port))


def test_truncated_weights(tmp_path):
    whole = resolve("").path.read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    assert "truncated" in fail_to_serve(str(tmp_path / "half.gguf"))


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "weights" in fail_to_serve(str(tmp_path))


def test_an_unknown_family_is_named_before_what_else_is_missing(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    assert "did you mean llama?" in fail_to_serve(str(tmp_path))


def test_too_little_memory():
    assert "--kv-cache-memory-bytes" in fail_to_serve("--kv-cache-memory-bytes", "1000")
    line = fail_to_serve("--kv-cache-memory-bytes", "10M", "--max-model-len", "8192")
    assert "--max-model-len" in line


@pytest.mark.parametrize(
    "arguments", [("--dtype", "float7"), ("--port", "99999"), ("--max-num-seqs", "0"), ("/nowhere/at/all",)]
)
def test_bad_flag_values(arguments):
    assert arguments[-1] in fail_to_serve(*arguments)


def test_an_engine_that_does_not_come_up_in_time_is_named():
    """API processes wait for it: nobody says that they are late."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", "--start-timeout", "0.2"]
    served = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert served.returncode == 1 and "the engine was not ready within 0.2 s" in served.stderr, served.stderr
    assert "is not ready" not in served.stderr
