"""A Ray cluster whose nodes are network namespaces of this machine, joined by a bridge: a node can be cut off from all others. Needs root."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.cluster.peers import free_port
from tests.cluster.ray_nodes import SETTINGS, ports

NAME = "octnet"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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
        # Ports that it would choose itself are those of the machine, of which a namespace has its own.
        more = [f"--{name.replace('_', '-')}={each}" for name, each in ports().items()]
        started.append(
            subprocess.Popen(
                [*prefix, *ray, *words, *more],
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
        time.sleep(5)
        for number, space in enumerate(spaces):
            where = (f"--address={network}1:{port}", f"--node-ip-address={network}{number + 2}", "--num-cpus=1")
            start(["ip", "netns", "exec", space], *where)
        yield CutNodes(f"{network}1:{port}", spaces)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{space}a"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
