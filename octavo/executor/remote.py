"""Ranks that something else starts, on this machine or on others: a launcher runs a command for each, and each connects back to the
executor and proves that it knows the engine's secret (ipc/secure_channel.py)."""

import threading
import time
from typing import NamedTuple, Protocol

import msgspec

from octavo import __version__
from octavo.errors import ConfigError, EngineDead
from octavo.ipc.secure_channel import SecureConnection, SecureListener
from octavo.messages import RankHello

CHANNELS = ("steps", "side", "lifeline")
_POLL_S = 0.2


class RankCommand(NamedTuple):
    """How one rank is started: `python` + arguments, with these variables added to its environment."""

    rank: int
    arguments: list[str]
    environment: dict[str, str]


class RankPlace(NamedTuple):
    """Where a rank will be."""

    host: str  # name or address, for messages
    local_rank: int  # its number among this engine's ranks on that host, and of its GPU
    num_local_ranks: int


class RankHandle(Protocol):
    """A rank that was started."""

    def ending(self, timeout: float) -> int | None:
        """The exit code (negative: a signal's number), or None if it still runs, or is not known to have ended, after `timeout` s."""

    def kill(self) -> None:
        """End it if it still runs; idempotent."""


class RankLauncher(Protocol):
    """Starts an engine's ranks: Ray's placement groups, or anything that can run a command on a host."""

    host: str
    """The address of this machine that ranks can reach: the executor listens there."""
    secret: bytes
    """Known to this engine's ranks alone; its commands' environments have it."""

    def place(self, num_ranks: int) -> list[RankPlace]:
        """Decide where the ranks will be, in rank order. Ranks of one stage come one after the other: keep them together. Raises
        ConfigError if there is no room for all."""

    def launch(self, command: RankCommand) -> RankHandle:
        """Start one rank, at its place."""

    def close(self) -> None:
        """Free what place() has taken."""


class RemoteRank:
    """One launched rank and its connections."""

    def __init__(self, number: int, place: RankPlace, handle: RankHandle) -> None:
        self.number, self.place = number, place
        self._handle = handle
        self.channels: dict[str, SecureConnection] = {}
        self.hello: RankHello | None = None

    @property
    def connection(self) -> SecureConnection:
        return self.channels["steps"]

    @property
    def side(self) -> SecureConnection:
        return self.channels["side"]

    @property
    def where(self) -> str:
        return f" on {self.place.host}"

    @property
    def is_complete(self) -> bool:
        return len(self.channels) == len(CHANNELS)

    def ending(self, timeout: float) -> int | None:
        return self._handle.ending(timeout)

    def close_pipes(self) -> None:
        for name in ("steps", "lifeline"):
            if name in self.channels:
                self.channels[name].close()

    def end(self, timeout: float) -> None:
        if self.ending(timeout) is None:
            self._handle.kill()
        if "side" in self.channels:
            self.side.close()


class Gathering:
    """Launches the ranks of an engine and waits until all have connected."""

    def __init__(self, launcher: RankLauncher, num_ranks: int) -> None:
        secret = launcher.secret
        self.ranks: list[RemoteRank] = []
        self._changed = threading.Condition()
        self._launcher = launcher
        self._listener = SecureListener(launcher.host, secret, self._join)
        host, port = self._listener.address
        try:
            places = launcher.place(num_ranks)
            for number, place in enumerate(places):
                command = RankCommand(
                    number,
                    ["-P", "-m", "octavo.worker.main", "--connect", f"{host}:{port}", str(number)],
                    {"OCTAVO_RANK_SECRET": secret.hex()},
                )
                handle = launcher.launch(command)
                with self._changed:
                    self.ranks.append(RemoteRank(number, place, handle))
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float) -> str:
        """Wait until every rank has connected. → the address at which they meet. Raises ConfigError if their versions differ, and EngineDead
        if a rank ends or does not come."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while missing := [rank for rank in self.ranks if not rank.is_complete]:
                for rank in missing:
                    if (code := rank.ending(0)) is not None:
                        raise EngineDead(
                            f"rank {rank.number}{rank.where} ended with code {code} before it had connected"
                        )
                if time.monotonic() > deadline:
                    raise EngineDead(
                        f"rank {missing[0].number}{missing[0].where} has not connected to {self._listener.address[0]} within "
                        f"{timeout:.0f} s"
                    )
                self._changed.wait(_POLL_S)
        hellos = [rank.hello for rank in self.ranks if rank.hello is not None]
        for rank, hello in zip(self.ranks, hellos, strict=True):
            if (hello.version, hello.torch) != (__version__, hellos[0].torch):
                raise ConfigError(
                    f"rank {rank.number}{rank.where} runs octavo {hello.version} with torch {hello.torch}, and here are octavo "
                    f"{__version__} and, at rank 0, torch {hellos[0].torch}: install the same versions on every host"
                )
        return f"tcp://{hellos[0].address}:{hellos[0].rendezvous_port}"

    def close(self) -> None:
        self._listener.close()
        self._launcher.close()

    def _join(self, connection: SecureConnection, said: bytes) -> None:
        """Called by a thread of the listener, for a side that knows the secret."""
        hello = msgspec.msgpack.decode(said, type=RankHello)
        with self._changed:
            if hello.rank >= len(self.ranks) or hello.channel in self.ranks[hello.rank].channels:
                connection.close()
                return
            rank = self.ranks[hello.rank]
            rank.channels[hello.channel] = connection
            if hello.channel == "steps":
                rank.hello = hello
            self._changed.notify_all()
