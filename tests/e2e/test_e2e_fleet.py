"""Two replicas behind one server, killed and stopped under real streams: clients see a pause, and every answer whole."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.adapters import write_model
from tests.e2e.mortal_engine import DEADLY
from tests.e2e.servers import Server
from tests.e2e.test_e2e_recovery import in_calm_steps, stories

pytestmark = pytest.mark.model

NUM_STREAMS = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["CALM_TEST_FILE"] = str(tmp_path_factory.mktemp("mortal") / "calm")
    arguments = ("--data-parallel-size", "2", "--kv-cache-memory-bytes", "256M", "--api-processes", "2")
    with Server(*arguments, "--record-bytes", "0", module="tests.e2e.mortal_engine") as server:
        yield server
        assert server.terminate() == 0, server.lines


@pytest.fixture(scope="module")
def untroubled(server):
    return asyncio.run(stories(server, num_streams=NUM_STREAMS))


def engines(server: Server) -> list[int]:
    return sorted(pid for pid, command in server.children().items() if command.endswith("mortal_engine"))


def replicas(server: Server) -> list[dict]:
    return json.loads(server.get("/health/progress")[1])["replicas"]


def wait_for_all(server: Server) -> None:
    deadline = time.monotonic() + 60
    while [each["status"] for each in replicas(server)] != ["ready", "ready"]:
        assert time.monotonic() < deadline, server.lines
        time.sleep(0.05)


def test_the_start_says_how_the_machine_is_divided(server):
    assert any("replicas: 2 (--data-parallel-size)" in line for line in server.lines)
    assert [each["replica"] for each in replicas(server)] == [0, 1]
    assert all(any(f"replica {number}: core" in line for line in server.lines) for number in (0, 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_at_the_other_replica(server, untroubled, number):
    wait_for_all(server)
    victims: list[int] = []

    def fault() -> None:
        """Whatever the load of the machine's cores, the replica with more requests has some."""
        pids = {each["replica"]: each["pid"] for each in replicas(server)}
        busiest = max(pids, key=lambda replica: server.metric("vllm:num_requests_running", f'engine="{replica}"'))
        victims.append(pids[busiest])
        os.kill(victims[0], number)

    answers = asyncio.run(stories(server, in_calm_steps(fault), NUM_STREAMS, num_streams=NUM_STREAMS))
    assert answers == untroubled
    assert server.get("/health")[0] == 200
    found = json.loads(server.get("/v1/requests?state=finished&limit=1000")[1])["data"]
    moved = [each["replicas"] for each in found if len(each["replicas"]) > 1]
    assert moved and all(places[-1]["moved"] == "the replica ended" for places in moved)
    wait_for_all(server)
    assert victims[0] not in engines(server)


def test_a_deadly_request_ends_two_engines_and_fails(server):
    wait_for_all(server)
    before = [each["restarts"] for each in replicas(server)]
    status, body = server.post("/v1/completions", {"prompt": f"The river{DEADLY} is", "max_tokens": 5})
    assert status == 500 and "engines have ended with request" in body, body
    wait_for_all(server)
    after = [each["restarts"] for each in replicas(server)]
    assert sum(after) - sum(before) == 2


def test_metrics_and_live_state_are_of_all_replicas(server):
    wait_for_all(server)
    deadline, lines = time.monotonic() + 60, []
    while len(lines) < 2:  # the other API process may be a moment behind
        assert time.monotonic() < deadline, lines
        text = server.get("/metrics")[1]
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'engine="0"' in lines[0] and 'engine="1"' in lines[1]
    assert server.get("/v1/live/history?seconds=60")[0] == 200


def scale(server: Server, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "octavo.cli.main", "scale", *arguments, "--url", server.base]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_replicas_are_removed_added_and_started_again_under_streams(server, untroubled):
    wait_for_all(server)
    before = {each["replica"]: each["epoch"] for each in replicas(server)}
    done: list[subprocess.CompletedProcess] = []

    def change() -> None:
        def run() -> None:
            done.extend((scale(server, "1"), scale(server, "2", "--restart")))

        worker.append(threading.Thread(target=run))
        worker[0].start()

    worker: list[threading.Thread] = []
    answers = asyncio.run(stories(server, in_calm_steps(change), NUM_STREAMS, num_streams=NUM_STREAMS))
    worker[0].join()
    assert answers == untroubled
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    wait_for_all(server)
    assert all(each["epoch"] != before[each["replica"]] for each in replicas(server))
    assert any("replica 1 is removed" in line for line in server.lines)


def test_a_replica_is_drained_only_when_all_api_processes_use_the_one_before_it(server):
    wait_for_all(server)
    first, engine = len(server.lines), replicas(server)[0]["pid"]
    late = max(pid for pid, command in server.children().items() if command.endswith("server.process"))
    done: list[subprocess.CompletedProcess] = []
    worker = threading.Thread(target=lambda: done.append(scale(server, "--restart")))

    def wait_for(is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < deadline, server.lines[first:]
            time.sleep(0.01)

    def has(words: str) -> bool:
        return any(words in line for line in server.lines[first:])

    worker.start()
    try:
        wait_for(lambda: engine not in engines(server))
        os.kill(late, signal.SIGSTOP)  # it does not hear from the new engine
        wait_for(lambda: has("replica 0 is back"))
        time.sleep(1.5)  # the supervisor looks every half second
        assert not has("draining replica 1")
    finally:
        os.kill(late, signal.SIGCONT)
        worker.join()
    assert done[0].returncode == 0 and has("draining replica 1"), done[0].stderr
    assert "0 of 2" not in done[0].stderr
    assert not has("API process")  # it was not replaced


def test_fewer_replicas_during_a_rolling_restart_leave_one_that_takes_requests(server):
    wait_for_all(server)
    first, engine = len(server.lines), replicas(server)[0]["pid"]
    assert server.post("/v1/fleet", {"restart": True})[0] == 202
    deadline = time.monotonic() + 60
    while engine in engines(server):  # the first replica is being started again
        assert time.monotonic() < deadline, server.lines[first:]
        time.sleep(0.01)
    try:
        # At once: before a command has started, the second one's turn may have come.
        assert server.post("/v1/fleet", {"replicas": 1})[0] == 202
        done = scale(server, "1")
        assert done.returncode == 0 and "0 of" not in done.stderr, done.stderr
        said = "\n".join(server.lines[first:])
        assert said.index("replica 0 is back") < said.index("draining replica 1") < said.index("replica 1 is removed")
        assert said.count("draining") == 2, "the second one is removed, and not started again before"
    finally:
        assert scale(server, "2").returncode == 0


def test_a_wish_that_cannot_be_met_is_refused(server):
    for body, words in (
        ({}, "give replicas"),
        ({"replicas": 0}, "between 1 and 64"),
        ({"replicas": 65}, "between 1 and 64"),
        ({"replicas": "x"}, "replicas"),
    ):
        status, answer = server.post("/v1/fleet", body)
        assert status == 400 and words in answer
    for arguments, words in ((("99",), "between 1 and 64"), (("0",), "between 1 and 64"), ((), "give the number")):
        done = scale(server, *arguments)
        assert done.returncode == 2 and words in done.stderr


def test_a_rolling_restart_with_weights_that_cannot_be_loaded_leaves_a_replica(tmp_path):
    model = tmp_path / "model"
    write_model(model, 256)
    arguments = ("--data-parallel-size", "2", "--kv-cache-memory-bytes", "2M", "--api-processes", "1")
    arguments += ("--record-bytes", "0", "--max-engine-restarts", "0", "--cpu-threads", "1")
    with Server(str(model), *arguments) as server:
        old = replicas(server)[1]["pid"]
        broken = tmp_path / "broken"
        broken.write_bytes(b"no weights")
        broken.replace(model / "model.safetensors")
        done = scale(server, "--restart", "--timeout", "60")
        assert done.returncode == 1 and "replica 0 has failed" in done.stderr, done.stderr
        assert "the rolling restart has ended" in done.stderr
        assert [each["status"] for each in replicas(server)] == ["failed", "ready"]
        assert replicas(server)[1]["pid"] == old
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})[0] == 200
