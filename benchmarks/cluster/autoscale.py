"""Replicas that follow the load through Ray's autoscaler: a head without cores, and nodes that the autoscaler starts and ends (its provider
for one machine, that of ray.cluster_utils.AutoscalingCluster). Clients send more than one replica computes, then stop. No request may fail."""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cluster.peers import free_port
from octavo.cli.bench.workload import WORDS
from tests.cluster.ray_nodes import SETTINGS
from tests.e2e.servers import Server

NAME = "autoscale"
HOST = "127.0.0.1"
HEAD_NODE = "f" * 51 + "00000"  # as the provider names it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=2, help="at most")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds for each direction")


@contextlib.contextmanager
def autoscaling_head(most_nodes: int) -> Iterator[str]:
    """A Ray head without cores, and nodes of one core each when they are asked for. → its address"""
    port = free_port()
    names = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config = {
        "cluster_name": "octavo",
        "max_workers": most_nodes,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"{HOST}:{port}",
            "launch_multiple": True,
            "head_node_id": HEAD_NODE,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "node": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most_nodes},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in names},
    }
    with tempfile.TemporaryDirectory(prefix="octavo-autoscale-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        command += [
            f"--node-ip-address={HOST}",
            "--num-cpus=0",
            "--include-dashboard=false",
            f"--autoscaling-config={path}",
        ]
        environment = {**os.environ, **SETTINGS, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        environment |= {"RAY_enable_autoscaler_v2": "1"}
        environment |= {"RAY_CLOUD_INSTANCE_ID": HEAD_NODE, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_NODE}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield f"{HOST}:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Clients:
    """Each sends one request after the other, of which no two share a prefix."""

    def __init__(self, server: Server, count: int) -> None:
        self.statuses: list[int] = []
        self._server, self._is_over = server, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over.is_set():
            prompt = " ".join(rng.choices(WORDS, k=1200))
            body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            self.statuses.append(self._server.post("/v1/completions", body)[0])

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def run(arguments: argparse.Namespace) -> None:
    flags = ["--min-replicas", "1", "--max-replicas", str(arguments.replicas), "--saturation-seconds", "0.5"]
    flags += ["--distributed-executor-backend", "ray", "--cpu-threads", "1", "--api-processes", "1"]
    flags += ["--kv-cache-memory-bytes", "64M", "--record-bytes", "0"]
    defaults = Path(importlib.util.find_spec("ray").origin).parent / "autoscaler/_private/fake_multi_node/example.yaml"
    if not defaults.exists():
        sys.exit(
            f"this installation of Ray lacks {defaults}, without which its autoscaler does not start: write {{}} into it"
        )
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(autoscaling_head(arguments.replicas))
        _wait_for_head(address)
        server = stack.enter_context(Server(*flags, "--ray-address", address, environment=SETTINGS))
        began = time.monotonic()
        print(f"{time.strftime('%T')} ready: {_fleet(server)}", flush=True)
        clients = Clients(server, arguments.clients)
        grown = _follow(server, began, arguments.limit, arguments.replicas)
        clients.stop()
        print(f"  clients have stopped after {time.monotonic() - began:.0f} s", flush=True)
        shrunk = _follow(server, began, arguments.limit, 1)
        nodes = [
            line.partition("octavo: ")[2]
            for line in server.lines
            if "has joined" in line or "has left" in line or "is gone" in line
        ]
    print("  " + "\n  ".join(nodes))
    bad = [status for status in clients.statuses if status != 200]
    print(f"{len(clients.statuses)} requests, {len(bad)} of them failed {bad[:5]}")
    if bad or not grown or not shrunk:
        sys.exit(f"FAILED: grown {grown}, shrunk {shrunk}")


def _wait_for_head(address: str) -> None:
    look = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)"
    deadline = time.monotonic() + 60
    while subprocess.run(
        [sys.executable, "-c", look, address], env={**os.environ, **SETTINGS}, capture_output=True
    ).returncode:
        assert time.monotonic() < deadline, "Ray's head does not start"


def _fleet(server: Server) -> str:
    fleet = json.loads(server.get("/v1/fleet")[1])
    return f"{fleet['target']} wanted; " + ", ".join(
        f"{each['replica']} {each['status']} ({each['place']})" for each in fleet["replicas"]
    )


def _follow(server: Server, began: float, limit: float, count: int) -> bool:
    """Print what changes until there are so many replicas, all ready."""
    said, until = "", time.monotonic() + limit
    while time.monotonic() < until:
        words = _fleet(server)
        if words != said:
            said = words
            print(f"  {time.monotonic() - began:5.1f} s: {words}", flush=True)
        states = [each["status"] for each in json.loads(server.get("/v1/fleet")[1])["replicas"]]
        if states == ["ready"] * count:
            return True
        time.sleep(0.5)
    return False
