"""Streams over several replicas of a real server, one of which is killed or stopped: errors, tokens that differ from an untroubled run, and
how long each stream of the lost replica waited for its next token. Other faults: a rank of a replica of two is killed; one of two API processes is
killed, and its clients reconnect with their streams' ids. With --ray, replicas are on the nodes of a Ray cluster on this machine, and the
whole node is killed or stopped, or cut off from the network for 10 s, or Ray's head process (GCS) is killed, which no stream may notice. With
--peer, another project's router is before servers of one replica each, one of which is killed."""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster.namespaces import CutNodes, cut_nodes
from benchmarks.cluster.peers import PEER_MODEL, peer_router
from tests.cluster.ray_nodes import SETTINGS, RayNodes, descendants
from tests.e2e.servers import Server

Prompt = str | list[int]

NAME = "failover"
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PARTITION_SECONDS = 10.0
LIMITS = {"stop": 6.0, "partition": 6.0}  # seconds without a token; others: 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fault",
        choices=[*sorted(FAULTS), "rank", "api", "gcs", "partition"],
        default="kill",
        help="SIGKILL or SIGSTOP of a replica; SIGKILL of a rank, an API process, Ray's head process; a network that is cut (default: kill)",
    )
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, with a node for each replica")
    parser.add_argument("--peer", type=Path, help="program of sglang-router or vllm-router")
    parser.add_argument("--model", default="", help="default: the embedded one, whose heads 3 ranks divide, and not 2")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="go on with new requests for so long after the fault"
    )
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
    is_resumable: bool = False
    num_events: int = 0
    num_resumed: int = 0
    is_done: bool = False

    def read(self, base: str, number: int, num_tokens: int, prompt: Prompt) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "stream": True}
        body |= {"temperature": 0.8, "seed": number, "ignore_eos": True, "model": PEER_MODEL}
        if self.is_resumable:
            body["stream_options"] = {"resumable": True}
        try:
            self._follow(
                urllib.request.Request(
                    f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
            )
            while self.is_resumable and not self.is_done and not self.error and self.num_resumed < 100:
                self.num_resumed += 1
                self._follow(urllib.request.Request(f"{base}/v1/stream/{self.response_id}?from={self.num_events}"))
        except urllib.error.HTTPError as error:
            self.error = f"status {error.code}"
        if not self.is_done and not self.error:
            self.error = "cut"

    def _follow(self, request: urllib.request.Request) -> None:
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"id: "):
                        self.num_events = int(line[4:])
                    elif line.startswith(b"data: "):
                        self.num_events += 1
                        self.is_done = line.startswith(b"data: [DONE]")
                        if not self.is_done:
                            self._take(json.loads(line[6:]))
        except urllib.error.HTTPError:
            raise
        except OSError:
            pass  # cut off

    def _take(self, chunk: dict) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            self.times.append(time.monotonic())
        self.response_id = chunk.get("id", self.response_id)


def streams(
    base: str, arguments: argparse.Namespace, at: int, fault, prompts: Sequence[Prompt] = ()
) -> tuple[list[Stream], float]:
    """All streams to their ends. `fault` is called once every stream has had `at` events; returns when that was."""
    prompts = prompts or [f"Story number {number}: Once upon a time" for number in range(arguments.streams)]
    found = [Stream(is_resumable=arguments.fault == "api") for _ in range(arguments.streams)]
    threads = [
        threading.Thread(target=each.read, args=(base, number, arguments.tokens, prompts[number]))
        for number, each in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    when = 0.0
    if fault is not None:
        while not all(len(each.times) >= at or each.error or each.is_done for each in found):
            time.sleep(0.005)
        when = time.monotonic()
        fault()
    for thread in threads:
        thread.join()
    return found, when


def _fault(server: Server, nodes: RayNodes | CutNodes | None, fault: str) -> None:
    children = server.children()
    engines = sorted(pid for pid, command in children.items() if command.endswith("engine.process"))
    if fault == "rank":
        ranks = [
            pid
            for pid in descendants(engines[0])[1:]
            if b"octavo.worker" in _command(pid) or b"octavo.executor" in _command(pid)
        ]
        os.kill(max(ranks), signal.SIGKILL)
    elif fault == "api":
        os.kill(min(pid for pid, command in children.items() if command.endswith("server.process")), signal.SIGKILL)
    elif nodes is None:
        os.kill(engines[0], FAULTS[fault])
    elif isinstance(nodes, CutNodes):
        place = json.loads(server.get("/v1/fleet")[1])["replicas"][0]["place"]
        number = next(number for number, address in enumerate(nodes.addresses) if f"({address}," in place)
        nodes.cut(number, True)
        threading.Timer(PARTITION_SECONDS, nodes.cut, (number, False)).start()
    elif fault == "gcs":
        nodes.do("gcs")
    elif fault == "kill":
        place = json.loads(server.get("/v1/fleet")[1])["replicas"][0]["place"]
        number = next(number for number, node in enumerate(nodes.nodes) if node[:8] in place)
        nodes.do(f"kill {number}")
    else:
        for pid in descendants(nodes.agents()[0]):
            os.kill(pid, signal.SIGSTOP)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def run(arguments: argparse.Namespace) -> None:
    if arguments.peer is not None:
        return run_peer(arguments)
    fault = arguments.fault
    limit = arguments.limit or LIMITS.get(fault, 3.0)
    flags = ["--data-parallel-size", str(arguments.replicas), "--kv-cache-memory-bytes", "256M", "--record-bytes", "0"]
    flags += ["--served-model-name", PEER_MODEL, *([arguments.model] if arguments.model else [])]
    flags += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    flags += ["--pipeline-parallel-size", str(arguments.pipeline_parallel_size)]
    if fault == "rank" and arguments.tensor_parallel_size * arguments.pipeline_parallel_size == 1:
        sys.exit("--fault rank needs --tensor-parallel-size or --pipeline-parallel-size")
    if fault == "api":
        flags += ["--api-processes", "2"]
    with contextlib.ExitStack() as stack:
        nodes: RayNodes | CutNodes | None = None
        if fault == "partition":
            nodes = stack.enter_context(cut_nodes(arguments.replicas))
        elif arguments.ray or fault == "gcs":
            nodes = RayNodes(*[1] * arguments.replicas)
            stack.callback(nodes.close)
        if nodes is not None:
            flags += ["--distributed-executor-backend", "ray", "--ray-address", nodes.address, "--cpu-threads", "1"]
        server = stack.enter_context(Server(*flags, environment=None if nodes is None else SETTINGS))
        calm, _ = streams(server.base, arguments, 0, None)
        found, when = streams(server.base, arguments, 8, functools.partial(_fault, server, nodes, fault))
        journeys = json.loads(server.get(f"/v1/requests?state=finished&limit={arguments.streams}")[1])["data"]
        if arguments.minutes:
            _ask_on(server, arguments.minutes)
        if nodes is not None:
            print("\n".join(line for line in server.lines if "node" in line or "Ray" in line))
        back = _seconds_until_ready(server, arguments.replicas, when) if fault == "partition" else None
    moved = {name for each in journeys if len(each["replicas"]) > 1 for name in each["response_ids"]}
    num_errors = sum(bool(each.error) for each in found)
    num_same = sum(each.text == other.text for each, other in zip(found, calm, strict=True))
    gaps = [
        max(b - a for a, b in zip(each.times, each.times[1:], strict=False)) for each in found if len(each.times) > 1
    ]
    print(f"{fault}: {arguments.replicas} replicas, {arguments.streams} streams of {arguments.tokens} tokens")
    print(f"  errors {num_errors}, token-identical {num_same} of {len(found)}, moved to another replica {len(moved)}")
    if fault == "api":
        print(f"  resumed by their ids {sum(bool(each.num_resumed) for each in found)}")
    print(f"  longest time without a token {max(gaps):.2f} s, limit {limit:g} s")
    if back is not None:
        print(f"  all replicas ready {back:.1f} s after the fault")
    is_right = bool(moved) == (fault not in ("gcs", "api"))
    if num_errors or num_same < len(found) or not is_right or max(gaps) > limit:
        sys.exit(1)


def _ask_on(server: Server, minutes: float) -> None:
    """New requests for so long after the fault."""
    until, statuses = time.monotonic() + 60 * minutes, []
    while time.monotonic() < until:
        statuses.append(_status(server.base))
        time.sleep(5)
    states = [each["status"] for each in json.loads(server.get("/v1/fleet")[1])["replicas"]]
    print(
        f"{minutes:g} minutes after it: {len(statuses)} new requests, {sum(each == 200 for each in statuses)} answered; replicas {states}"
    )
    if set(statuses) != {200}:
        sys.exit(1)


def _seconds_until_ready(server: Server, count: int, since: float) -> float:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        states = [each["status"] for each in json.loads(server.get("/v1/fleet")[1])["replicas"]]
        if states == ["ready"] * count:
            break
        time.sleep(0.1)
    return time.monotonic() - since


def run_peer(arguments: argparse.Namespace) -> None:
    """The same streams before a router that proxies HTTP, and 30 requests after the fault. What it shows is its own: there is no limit."""
    flags = ["--kv-cache-memory-bytes", "256M", "--record-bytes", "0", "--served-model-name", PEER_MODEL]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(*flags, "--api-processes", "1")) for _ in range(arguments.replicas)]
        base = stack.enter_context(peer_router(arguments.peer, [server.base for server in servers]))
        calm, _ = streams(base, arguments, 0, None)

        def kill() -> None:
            counts = [server.in_use()[0] for server in servers]
            print(
                f"{arguments.peer.name}: streams at the servers {[int(count) for count in counts]}; the first of the busiest is killed"
            )
            for pid in descendants(servers[counts.index(max(counts))].process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        found, _ = streams(base, arguments, 8, kill)
        after = [_status(base) for _ in range(30)]
    num_cut = sum(each.error == "cut" for each in found)
    num_same = sum(each.text == other.text for each, other in zip(found, calm, strict=True))
    print(
        f"{arguments.peer.name}: {arguments.replicas} servers, {arguments.streams} streams of {arguments.tokens} tokens, one killed"
    )
    print(
        f"  streams cut {num_cut}, with an error {sum(bool(each.error) for each in found) - num_cut}, whole {num_same} of {len(found)}"
    )
    print(
        f"  30 requests after it: {sum(each == 200 for each in after)} answered, others {[each for each in after if each != 200]}"
    )


def _status(base: str) -> int:
    body = json.dumps({"model": PEER_MODEL, "prompt": f"Once {time.monotonic()}", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
