"""Engines behind relays and agents, on a cluster whose nodes are all here: the bytes of a single process, and streams that survive a node."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.local_placer import CALM_AGENT, ROOM
from tests.e2e.servers import Server
from tests.e2e.test_e2e_recovery import in_calm_steps, stories
from tests.processes import children_of, is_alive

pytestmark = pytest.mark.model

NUM_STREAMS = 8
ARGUMENTS = ("--kv-cache-memory-bytes", "64M", "--record-bytes", "0", "--cpu-threads", "1")
RAY = ("--distributed-executor-backend", "ray")


@pytest.fixture(scope="module")
def untroubled():
    with Server(*ARGUMENTS, "--api-processes", "1") as server:
        return asyncio.run(stories(server, num_streams=NUM_STREAMS))


@pytest.fixture(scope="module", autouse=True)
def calm(tmp_path_factory):
    os.environ["CALM_TEST_FILE"] = str(tmp_path_factory.mktemp("calm") / "calm")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A file that says how many replicas have room."""
    path = tmp_path_factory.mktemp("room") / "replicas"
    path.write_text("2")
    return path


@pytest.fixture(scope="module")
def server(room: Path):
    arguments = (*ARGUMENTS, *RAY, "--data-parallel-size", "2", "--api-processes", "2")
    with Server(*arguments, environment={ROOM: str(room)}, module="tests.cluster.local_placer") as server:
        yield server
        processes = tree(server.process.pid)
        assert server.terminate() == 0, server.lines
        deadline = time.monotonic() + 30
        while left := {pid: name for pid, name in processes.items() if is_alive(pid)}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def tree(pid: int) -> dict[int, str]:
    """All processes that it started, at any depth."""
    found = dict(children_of(pid))
    for child in list(found):
        found |= tree(child)
    return found


def replicas(server: Server) -> list[dict]:
    return json.loads(server.get("/health/progress")[1])["replicas"]


def eventually(server: Server, is_so: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, (replicas(server), server.lines)
        time.sleep(0.05)


def wait_for(server: Server, *statuses: str) -> None:
    eventually(server, lambda: [each["status"] for each in replicas(server)] == list(statuses))


def agents(server: Server) -> list[int]:
    return sorted(pid for pid, name in tree(server.process.pid).items() if CALM_AGENT in name)


def test_the_start_says_where_replicas_are(server: Server) -> None:
    assert [each["place"] for each in replicas(server)] == [
        f"node here (127.0.0.1, 000{number}0000), 1 thread" for number in (0, 1)
    ]
    assert any("a cluster on this machine" in line for line in server.lines), server.lines
    assert any("recorder: on the nodes of the replicas" in line for line in server.lines)


def test_metrics_history_and_journeys_come_from_the_nodes(server: Server) -> None:
    wait_for(server, "ready", "ready")
    status, body = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0})
    assert status == 200, body
    assert server.metric("vllm:generation_tokens_total") >= 4
    eventually(
        server, lambda: server.metric("octavo:replica_ready", 'engine="1",place="node here (127.0.0.1, 00010000)') == 1
    )
    assert server.metric("octavo:replicas_wanted") == 2
    journey = json.loads(server.get("/v1/requests?state=finished&limit=1")[1])["data"][0]
    assert journey["replicas"][0]["replica"] in (0, 1) and 0 <= journey["seconds"] < 120
    assert all(stage["end"] >= stage["start"] >= 0 for stage in journey["stages"])
    assert server.get("/health")[0] == 200


def test_streams_survive_a_node_that_is_cut_off(server: Server, untroubled: list[tuple]) -> None:
    wait_for(server, "ready", "ready")
    victims: list[int] = []

    def fault() -> None:
        victim = agents(server)[0]
        victims.extend([victim, *tree(victim)])
        for pid in victims:  # all at once, as a power cut
            os.kill(pid, signal.SIGKILL)

    answers = asyncio.run(stories(server, in_calm_steps(fault), NUM_STREAMS, num_streams=NUM_STREAMS))
    assert answers == untroubled
    # Whichever is noticed first: the connection's end, or that of the actor.
    lost = re.compile(
        r"replica \d ended unexpectedly \((the connection to )?node here \(127.0.0.1, \d+\)(: its agent ended| is lost)"
    )
    assert any(lost.search(line) for line in server.lines), server.lines
    wait_for(server, "ready", "ready")


def test_streams_survive_a_node_that_is_stopped_and_none_is_answered_twice(
    server: Server, untroubled: list[tuple]
) -> None:
    """A machine that hangs, or a partition: connections stay open, and nothing comes. Later it goes on, and sends what it had."""
    wait_for(server, "ready", "ready")
    victims: list[int] = []

    def fault() -> None:
        victim = agents(server)[0]
        victims.extend([victim, *tree(victim)])
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)

    answers = asyncio.run(stories(server, in_calm_steps(fault), NUM_STREAMS, num_streams=NUM_STREAMS))
    assert answers == untroubled
    for pid in victims:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
    wait_for(server, "ready", "ready")
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in victims):
        assert time.monotonic() < deadline, "its agent ends it"
        time.sleep(0.05)


def test_a_replica_without_room_waits_for_a_node(server: Server, room: Path, untroubled: list[tuple]) -> None:
    wait_for(server, "ready", "ready")
    room.write_text("1")
    for victim in agents(server):  # which of them is the second replica's is not known here
        os.kill(victim, signal.SIGKILL)
    eventually(server, lambda: "waits for room in the cluster: a replica needs 1 core" in replicas(server)[1]["place"])
    wait_for(server, "ready", "restarting")
    assert server.get("/health")[0] == 200
    # Any API process may answer, and one may hear of it later than the other.
    eventually(server, lambda: 'engine="1",place="waits for room in the cluster' in server.get("/metrics")[1])
    eventually(server, lambda: server.metric("octavo:replica_ready") == 1)
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
    room.write_text("2")
    wait_for(server, "ready", "ready")


@pytest.mark.parametrize(
    "sizes", [("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "3")], ids=["pp", "tp"]
)
def test_a_replica_over_several_nodes_gives_the_same_bytes_and_survives_a_rank(
    sizes: tuple[str, str], untroubled: list[tuple]
) -> None:
    """Slices of packed weights round their inputs otherwise than the whole: with tensor parallelism, its own tokens are the measure."""
    arguments = (*ARGUMENTS, *RAY, *sizes, "--api-processes", "1")
    with Server(*arguments, module="tests.cluster.local_placer") as server:

        def fault() -> None:
            ranks = [pid for pid, name in tree(server.process.pid).items() if "octavo.worker.main" in name]
            os.kill(max(ranks), signal.SIGKILL)

        is_tensor = sizes[0] == "--tensor-parallel-size"
        # Three ranks on two cores take long for a step: fewer of them.
        options = {"num_streams": NUM_STREAMS, "max_tokens": 12 if is_tensor else 40}
        expected = asyncio.run(stories(server, **options)) if is_tensor else untroubled
        assert asyncio.run(stories(server, in_calm_steps(fault), NUM_STREAMS, **options)) == expected
        assert any("rank" in line and "killed by signal 9" in line for line in server.lines), server.lines
        assert server.terminate() == 0, server.lines


def test_a_node_keeps_prefixes_on_its_own_disk(tmp_path: Path) -> None:
    """An engine that starts again on the node finds what the one before it computed."""
    tier, prompt = (
        tmp_path / "tier",
        "The rules of this house are few, and everybody learns them on the first day. " * 12,
    )
    arguments = (*ARGUMENTS, *RAY, "--api-processes", "1", "--kv-tier", f"disk:256MiB:{tier}")

    def ask() -> tuple[str, int]:
        status, text = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
        assert status == 200, text
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Server(*arguments, module="tests.cluster.local_placer") as server:
        assert any(f"every node keeps its own prefixes in {tier}" in line for line in server.lines), server.lines
        expected, _ = ask()
        eventually(server, lambda: server.metric("octavo:kv_tier_tokens_total", "stored") >= 160)
        (agent,) = agents(server)
        for pid in (agent, *tree(agent)):
            os.kill(pid, signal.SIGKILL)
        again, num_cached = ask()
        assert again == expected and num_cached >= 160
        assert server.metric("octavo:kv_tier_loads_total") == 1
        assert server.terminate() == 0, server.lines
