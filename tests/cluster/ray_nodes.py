"""A real Ray cluster of several nodes on this machine, in a process of its own: a head without cores, and nodes with some.

It prints its address, then obeys lines on its standard input: `kill N` ends everything on node N at once, as a power cut would; `add CORES` adds a
node; `gcs` kills the head's control service. It answers each with a line. End of file ends the cluster."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine is slow.
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_AUTH_MODE": "disabled",  # loopback, and no file in this user's home
}


class RayNodes:
    def __init__(self, *cores: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_nodes", *map(str, cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **SETTINGS},
            cwd=Path(__file__).parents[2],
        )
        answer = self._answer()
        self.address: str = answer["address"]
        self.nodes: list[str] = answer["nodes"]

    def do(self, command: str) -> dict:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def agents(self) -> list[int]:
        """Processes of the agents on all nodes."""
        found = []
        for pid in descendants(self._process.pid):
            with contextlib.suppress(OSError):
                if b"octavo.cluster.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        assert line, "the Ray cluster has ended"
        return json.loads(line)


def ports() -> dict[str, int]:
    """Free ports for a node's services. Otherwise its raylet waits 15 s for each to say which it has, and ends: too short on a busy machine."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in names]
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                found += map(int, children.read_text().split())
    return found


def main(cores: list[int]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **ports()})
    nodes = [cluster.add_node(num_cpus=count, **ports()) for count in cores]

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    def raylet_of(node) -> int:
        return node.all_processes["raylet"][0].process.pid

    answer(address=cluster.address, nodes=[node.node_id for node in nodes])
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                victims = descendants(raylet_of(nodes[int(number)]))
                began = time.monotonic()
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                answer(killed=victims, at=began)
            case ["add", count]:
                nodes.append(cluster.add_node(num_cpus=int(count), **ports()))
                answer(node=nodes[-1].node_id)
            case ["gcs"]:
                os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
                answer(killed="gcs")
    for node in nodes:
        for pid in reversed(descendants(raylet_of(node))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    cluster.shutdown()


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
