"""A real Ray cluster of several nodes on this machine: replicas are placed, spread and moved, and nothing is left behind."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from tests.cluster.ray_nodes import SETTINGS, RayNodes, descendants
from tests.cluster.test_cluster_relay import ARGUMENTS, NUM_STREAMS, RAY, replicas, wait_for
from tests.e2e.servers import Server
from tests.e2e.test_e2e_recovery import stories
from tests.processes import is_alive

pytest.importorskip("ray", reason="Ray is not installed: pip install octavo[ray]")
pytestmark = [pytest.mark.model, pytest.mark.ray]


@pytest.fixture(scope="module")
def nodes():
    made = RayNodes(1, 1, 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def untroubled():
    with Server(*ARGUMENTS, "--api-processes", "1") as server:
        return asyncio.run(stories(server, num_streams=NUM_STREAMS))


def failed(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """The log of a server that does not start."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", *ARGUMENTS, *RAY, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | SETTINGS | (environment or {})
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_cluster_that_is_not_there_or_too_small_is_one_clear_line(nodes: RayNodes) -> None:
    assert "no Ray cluster answers at 127.0.0.1:1 (--ray-address)" in failed("--ray-address", "127.0.0.1:1")
    assert "'somewhere' is not HOST:PORT of a Ray head" in failed("--ray-address", "somewhere")
    said = failed("--ray-address", nodes.address, "--pipeline-parallel-size", "4")
    assert "the Ray cluster is too small: a replica needs 1 core for each of its 4 ranks" in said
    assert said.count("1 of 1") == 3, "what each node has"
    said = failed("--ray-address", nodes.address, "--data-parallel-size", "4", "--cpu-threads", "1")
    line = next(line for line in said.splitlines() if "the Ray cluster has no room after" in line)
    assert "a replica needs 1 core" in line and line.count("0 of 1") == 3


def test_streams_survive_a_node_and_nothing_is_left_behind(nodes: RayNodes, untroubled: list[tuple]) -> None:
    arguments = (*ARGUMENTS, *RAY, "--ray-address", nodes.address, "--data-parallel-size", "3", "--api-processes", "1")
    with Server(*arguments, environment=SETTINGS) as server:
        places = [each["place"] for each in replicas(server)]
        assert len({*places}) == 3, "replicas are spread"
        assert any("Ray cluster at" in line and "4 nodes, 3 cores" in line for line in server.lines), server.lines
        assert any("does not ask for a token" in line for line in server.lines)
        number = next(n for n, node in enumerate(nodes.nodes) if node[:8] in places[0])
        answers = asyncio.run(stories(server, lambda: nodes.do(f"kill {number}"), NUM_STREAMS, num_streams=NUM_STREAMS))
        assert answers == untroubled
        deadline = time.monotonic() + 120
        while "waits for room" not in replicas(server)[0]["place"]:
            assert time.monotonic() < deadline, (replicas(server), server.lines)
            time.sleep(0.1)
        nodes.nodes.append(nodes.do("add 1")["node"])
        wait_for(server, "ready", "ready", "ready")
        assert nodes.nodes[-1][:8] in replicas(server)[0]["place"]
        agents = nodes.agents()
        assert len(agents) == 3
        below = [pid for agent in agents for pid in descendants(agent)]
        assert server.terminate() == 0, server.lines
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in below):
        assert time.monotonic() < deadline, below
        time.sleep(0.1)


def test_ranks_of_a_replica_on_two_nodes_give_the_same_bytes(nodes: RayNodes, untroubled: list[tuple]) -> None:
    arguments = (*ARGUMENTS, *RAY, "--ray-address", nodes.address, "--pipeline-parallel-size", "2")
    with Server(*arguments, "--api-processes", "1", environment=SETTINGS) as server:
        assert asyncio.run(stories(server, num_streams=NUM_STREAMS)) == untroubled
        assert server.terminate() == 0, server.lines


def test_streams_and_new_requests_go_on_without_rays_head(nodes: RayNodes, untroubled: list[tuple]) -> None:
    arguments = (*ARGUMENTS, *RAY, "--ray-address", nodes.address, "--data-parallel-size", "2", "--api-processes", "1")
    with Server(*arguments, environment=SETTINGS) as server:
        answers = asyncio.run(stories(server, lambda: nodes.do("gcs"), NUM_STREAMS, num_streams=NUM_STREAMS))
        assert answers == untroubled
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4})[0] == 200
        assert [each["status"] for each in json.loads(server.get("/health/progress")[1])["replicas"]] == ["ready"] * 2
