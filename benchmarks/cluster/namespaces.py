"""A Ray cluster whose nodes are network namespaces of this machine, joined by a bridge: a node can be cut off from all others. Needs root."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.cluster.peers import START_LIMIT_S, free_port
from tests.cluster.ray_nodes import SETTINGS

NAME = "octnet"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=2).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _wait_for_nodes(address: str, count: int) -> None:
    look = "import ray, sys, time\nray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
    look += "while sum(each['Alive'] for each in ray.nodes()) < int(sys.argv[2]): time.sleep(0.2)"
    command = [sys.executable, "-c", look, address, str(count)]
    subprocess.run(
        command, check=True, timeout=START_LIMIT_S, env={**os.environ, **SETTINGS}, stderr=subprocess.DEVNULL
    )


class CutNodes:
    """`address`: of the head, which has no cores. Nodes have one each."""

    def __init__(self, address: str, spaces: list[str]) -> None:
        self.address, self._spaces = address, spaces
        self.addresses = [f"{address.rpartition('.')[0]}.{number + 2}" for number in range(len(spaces))]

    def cut(self, number: int, is_cut: bool) -> None:
        _ip("link", "set", f"{self._spaces[number]}a", "down" if is_cut else "up")


@contextlib.contextmanager
def cut_nodes(count: int) -> Iterator[CutNodes]:
    """Raises CalledProcessError where namespaces are not allowed."""
    bridge, network = f"{NAME}br", f"10.214.{os.getpid() % 250}."
    spaces = [f"{NAME}{number}" for number in range(count)]
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]

    def start(prefix: list[str], *words: str) -> None:
        started.append(
            subprocess.Popen(
                [*prefix, *ray, *words],
                env={**os.environ, **SETTINGS},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{network}1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, space in enumerate(spaces):
            _ip("netns", "add", space)
            _ip("link", "add", f"{space}a", "type", "veth", "peer", "name", f"{space}b")
            _ip("link", "set", f"{space}a", "master", bridge, "up")
            _ip("link", "set", f"{space}b", "netns", space)
            _ip("-n", space, "addr", "add", f"{network}{number + 2}/24", "dev", f"{space}b")
            _ip("-n", space, "link", "set", f"{space}b", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        start(
            [], "--head", f"--node-ip-address={network}1", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"
        )
        _wait_for(f"{network}1", port)
        for number, space in enumerate(spaces):
            where = (f"--address={network}1:{port}", f"--node-ip-address={network}{number + 2}", "--num-cpus=1")
            start(["ip", "netns", "exec", space], *where)
            # One after the other: nodes that start at the same time in one folder choose the same sockets.
            _wait_for_nodes(f"{network}1:{port}", number + 2)
        yield CutNodes(f"{network}1:{port}", spaces)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{space}a"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
