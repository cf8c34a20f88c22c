"""A model over ranks on the nodes of a Ray cluster on this machine, a node for each rank: its tokens beside those of
one rank without Ray, and what its processes take while nothing is asked."""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from benchmarks.cluster.failover import streams
from tests.cluster.ray_nodes import SETTINGS, RayNodes, descendants
from tests.e2e.servers import Server

NAME = "ranks"
MOST_IDLE = 0.03  # of a core
FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--record-bytes", "0", "--cpu-threads", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="default: the embedded one")
    parser.add_argument("--sizes", nargs="+", default=["1x2", "3x1"], help="tensor parallel x pipeline parallel")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--idle-seconds", type=float, default=20.0)


def run(arguments: argparse.Namespace) -> None:
    arguments.fault = ""
    model = [arguments.model] if arguments.model else []
    more = ("--served-model-name", "any", "--api-processes", "1")
    with Server(*model, *FLAGS, *more) as server:
        expected = streams(server.base, arguments, 0, None)[0]
    has_failed = False
    for size in arguments.sizes:
        tensor, stages = map(int, size.split("x"))
        with contextlib.closing(RayNodes(*[1] * (tensor * stages))) as nodes:
            flags = ("--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages))
            ray = ("--distributed-executor-backend", "ray", "--ray-address", nodes.address)
            with Server(*model, *FLAGS, *more, *flags, *ray, environment=SETTINGS) as server:
                found = streams(server.base, arguments, 0, None)[0]
                time.sleep(3)
                idle = _idle(server, nodes, arguments.idle_seconds)
        num_same = sum(each.text == other.text for each, other in zip(found, expected, strict=True))
        is_right = num_same == len(found) and not any(each.error for each in found)
        has_failed = has_failed or not is_right or sum(idle.values()) > MOST_IDLE
        print(f"tensor {tensor} x stages {stages}: {num_same} of {len(found)} streams as one rank's")
        print(
            f"  idle: {sum(idle.values()):.1%} of a core: "
            + ", ".join(f"{name} {share:.1%}" for name, share in idle.items()),
            flush=True,
        )
    if has_failed:
        sys.exit(f"FAILED: other tokens, or more than {MOST_IDLE:.0%} of a core while idle")


def _idle(server: Server, nodes: RayNodes, seconds: float) -> dict[str, float]:
    """Shares of a core that our own processes take, by kind. Ray's own are left out, but for the drivers and actors that we make."""
    pids = {pid for root in (server.process.pid, *nodes.agents()) for pid in descendants(root)}
    before = {pid: _cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    found: dict[str, float] = {}
    for pid in pids:
        name = _name(pid)
        found[name] = found.get(name, 0.0) + (_cpu_seconds(pid) - before[pid]) / seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    modules = [word for word in words if word.startswith("octavo.")]
    return modules[0].removeprefix("octavo.") if modules else words[0].rpartition("/")[2]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
