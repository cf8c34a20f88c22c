"""Two network namespaces joined by a virtual cable, as two hosts on one network, and a launcher that starts ranks in them."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from octavo.executor.remote import RankCommand, RankPlace

ROOT = Path(__file__).resolve().parents[2]


class LaunchedRank:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def ending(self, timeout: float) -> int | None:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class CommandLauncher:
    """Starts ranks by a command in front of theirs, one for each rank. `prefixes`: such as ["ip", "netns", "exec", NAME]; empty: here."""

    def __init__(self, host: str, prefixes: list[list[str]], environment: dict[str, str] | None = None) -> None:
        self.host, self._prefixes, self._environment = host, prefixes, environment or {}
        self.secret = secrets.token_bytes(32)
        self.ranks: list[LaunchedRank] = []
        self.is_closed = False

    def place(self, num_ranks: int) -> list[RankPlace]:
        assert num_ranks == len(self._prefixes)
        return [RankPlace(f"host {number}", 0, 1) for number in range(num_ranks)]

    def launch(self, command: RankCommand) -> LaunchedRank:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | command.environment | self._environment
        process = subprocess.Popen(
            [*self._prefixes[command.rank], sys.executable, *command.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        self.ranks.append(LaunchedRank(process))
        return self.ranks[-1]

    def close(self) -> None:
        self.is_closed = True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(name: str) -> Iterator[tuple[str, list[str]]]:
    """→ the address of a bridge that this process has, and two namespaces on it. OSError or CalledProcessError: not allowed here."""
    bridge, spaces = f"{name}br", [f"{name}{number}" for number in range(2)]
    address = f"10.213.{os.getpid() % 250}."
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{address}1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, space in enumerate(spaces):
            _ip("netns", "add", space)
            _ip("link", "add", f"{space}a", "type", "veth", "peer", "name", f"{space}b")
            _ip("link", "set", f"{space}a", "master", bridge, "up")
            _ip("link", "set", f"{space}b", "netns", space)
            _ip("-n", space, "addr", "add", f"{address}{number + 2}/24", "dev", f"{space}b")
            _ip("-n", space, "link", "set", f"{space}b", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield f"{address}1", spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{space}a"], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
