"""Streams over several replicas of a real server, one of which is killed or stopped: errors, tokens that differ from an untroubled run, and
how long each stream of the lost replica waited for its next token. With --ray, replicas are on the nodes of a Ray cluster on this machine, and the
whole node is killed or stopped, or Ray's head process (GCS) is killed, which no stream may notice."""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field

from tests.cluster.ray_nodes import SETTINGS, RayNodes, descendants
from tests.e2e.servers import Server

NAME = "failover"
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fault", choices=[*sorted(FAULTS), "gcs"], default="kill", help="SIGKILL or SIGSTOP (default: kill)"
    )
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, with a node for each replica")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of each stream")
    parser.add_argument(
        "--limit", type=float, default=0.0, help="exit with 1 if a stream waits longer (default: 3 or 6)"
    )


@dataclass
class Stream:
    text: str = ""
    error: str = ""
    times: list[float] = field(default_factory=list)
    response_id: str = ""

    def read(self, base: str, number: int, num_tokens: int) -> None:
        body = {"prompt": f"Story number {number}: Once upon a time", "max_tokens": num_tokens, "stream": True}
        body |= {"temperature": 0.8, "seed": number, "ignore_eos": True}
        request = urllib.request.Request(
            f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except OSError as error:
            self.error = str(error)

    def _take(self, chunk: dict) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            self.times.append(time.monotonic())
        self.response_id = chunk.get("id", self.response_id)


def streams(server: Server, arguments: argparse.Namespace, at: int, fault) -> tuple[list[Stream], float]:
    """All streams to their ends. `fault` is called once every stream has had `at` events; returns when that was."""
    found = [Stream() for _ in range(arguments.streams)]
    threads = [
        threading.Thread(target=each.read, args=(server.base, number, arguments.tokens))
        for number, each in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    when = 0.0
    if fault is not None:
        while not all(len(each.times) >= at or each.error for each in found):
            time.sleep(0.005)
        when = time.monotonic()
        fault()
    for thread in threads:
        thread.join()
    return found, when


def _fault(server: Server, nodes: RayNodes | None, fault: str) -> None:
    if nodes is None:
        victim = min(pid for pid, command in server.children().items() if command.endswith("engine.process"))
        os.kill(victim, FAULTS[fault])
    elif fault == "gcs":
        nodes.do("gcs")
    elif fault == "kill":
        place = json.loads(server.get("/v1/fleet")[1])["replicas"][0]["place"]
        number = next(number for number, node in enumerate(nodes.nodes) if node[:8] in place)
        nodes.do(f"kill {number}")
    else:
        for pid in descendants(nodes.agents()[0]):
            os.kill(pid, signal.SIGSTOP)


def run(arguments: argparse.Namespace) -> None:
    limit = arguments.limit or (6.0 if arguments.fault == "stop" else 3.0)
    flags = ["--data-parallel-size", str(arguments.replicas), "--kv-cache-memory-bytes", "256M", "--record-bytes", "0"]
    with contextlib.ExitStack() as stack:
        nodes = None
        if arguments.ray:
            nodes = RayNodes(*[1] * arguments.replicas)
            stack.callback(nodes.close)
            flags += ["--distributed-executor-backend", "ray", "--ray-address", nodes.address]
        server = stack.enter_context(Server(*flags, environment=SETTINGS if arguments.ray else None))
        calm, _ = streams(server, arguments, 0, None)
        found, when = streams(server, arguments, 8, functools.partial(_fault, server, nodes, arguments.fault))
        journeys = json.loads(server.get(f"/v1/requests?state=finished&limit={arguments.streams}")[1])["data"]
        if arguments.ray:
            print("\n".join(line for line in server.lines if "node" in line or "Ray" in line))
    moved = {name for each in journeys if len(each["replicas"]) > 1 for name in each["response_ids"]}
    waits = [
        next((then for then in each.times if then > when + 0.001), float("inf")) - when
        for each in found
        if each.response_id in moved
    ]
    num_errors = sum(bool(each.error) for each in found)
    num_same = sum(each.text == other.text for each, other in zip(found, calm, strict=True))
    gaps = [
        max(b - a for a, b in zip(each.times, each.times[1:], strict=False)) for each in found if len(each.times) > 1
    ]
    print(f"{arguments.fault}: {arguments.replicas} replicas, {arguments.streams} streams of {arguments.tokens} tokens")
    print(f"  errors {num_errors}, token-identical {num_same} of {len(found)}, moved {len(moved)}")
    print(
        f"  largest gap of any stream {max(gaps):.2f} s; first event of moved streams after the fault: worst {max(waits, default=0):.2f} s"
    )
    print(f"  limit {limit:g} s for the largest gap")
    if num_errors or num_same < len(found) or bool(moved) == (arguments.fault == "gcs") or max(gaps) > limit:
        sys.exit(1)
