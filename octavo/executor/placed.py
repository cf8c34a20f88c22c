"""PlacedLauncher: ranks whose places were chosen before their engine was started. An agent on each node runs them; the engine asks its own agent."""

import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from octavo.executor.remote import RankCommand, RankPlace
from octavo.ipc.launch import PlacedRanks
from octavo.messages import RankEnded, RunRank


class PlacedHandle:
    """A rank that an agent runs."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()
        self._code: int | None = None

    def note(self, code: int) -> None:
        self._code = code
        self._has_ended.set()

    def ending(self, timeout: float) -> int | None:
        self._has_ended.wait(timeout)
        return self._code

    def kill(self) -> None:
        """Its lifeline is closed, and its agent ends with the engine's."""


class PlacedLauncher:
    def __init__(self, ranks: PlacedRanks) -> None:
        self.host, self.secret = ranks.address, ranks.secret
        self._places = ranks.places
        self._agent: Connection[Any, Any] = Connection(ranks.fd)
        self._handles: dict[int, PlacedHandle] = {}
        threading.Thread(target=self._follow, name="octavo-ranks", daemon=True).start()

    def place(self, num_ranks: int) -> list[RankPlace]:
        assert num_ranks == len(self._places)
        return [RankPlace(each.host, each.local_rank, each.num_local_ranks) for each in self._places]

    def launch(self, command: RankCommand) -> PlacedHandle:
        """The secret in the command's environment is not sent: agents know it."""
        handle = self._handles[command.rank] = PlacedHandle()
        self._agent.send_bytes(msgspec.msgpack.encode(RunRank(command.rank, command.arguments)))
        return handle

    def close(self) -> None:
        """The places are freed by the agents' end."""

    def _follow(self) -> None:
        try:
            while True:
                ended = msgspec.msgpack.decode(self._agent.recv_bytes(), type=RankEnded)
                if ended.rank in self._handles:
                    self._handles[ended.rank].note(ended.code)
        except (EOFError, OSError):
            pass  # the agent has ended, and this process ends with it
