"""What the processes of a cluster send each other: the placer, which speaks with Ray; a relay for each replica, beside the supervisor; and
an agent for each rank, on its node."""

from typing import Literal

import msgspec

from octavo.messages import EngineReport, RankEnded, RunRank

# ── the supervisor and the placer ───────────────────────────────────────────────────────────────────


class PlacerLaunch(msgspec.Struct, frozen=True):
    """Start-up parameters of the placer."""

    address: str  # of the Ray cluster; empty: the one of this machine, or a new one
    listen: str  # path of the socket at which relays ask for places
    num_replicas: int  # that the cluster's cores are divided by
    log_format: str = "text"


class ClusterReport(msgspec.Struct, frozen=True, tag=True):
    """The placer is connected."""

    words: str  # for the log


class ClusterFailed(msgspec.Struct, frozen=True, tag=True):
    message: str


FromPlacer = ClusterReport | ClusterFailed

# ── relays and the placer ───────────────────────────────────────────────────────────────────────────


class WantPlace(msgspec.Struct, frozen=True, tag=True):
    """Asks for the places of a replica's ranks. They are kept until the connection is closed."""

    replica: int
    num_ranks: int
    device: str  # auto, cpu, cuda
    cpu_threads: int = 0  # of a rank; 0: a share of its node's
    is_patient: bool = False  # wait for room, however long it takes


class RunAgent(msgspec.Struct, frozen=True, tag=True):
    """Run a rank's agent at its place."""

    rank: int
    arguments: list[str]  # of python
    environment: dict[str, str]


ToPlacer = WantPlace | RunAgent


class HostPlace(msgspec.Struct, frozen=True):
    """Where a rank will be."""

    node: str  # Ray's id
    address: str
    name: str  # of the machine
    local_rank: int  # its number among the replica's ranks on that node
    num_local_ranks: int
    gpus: list[str] = []  # of all ranks of the replica on that node, in order

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its rank's process."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    @property
    def words(self) -> str:
        """For people. Nodes of one machine differ by their ids only."""
        return f"node {self.name} ({self.address}, {self.node[:8]})"


class NoRoomYet(msgspec.Struct, frozen=True, tag=True):
    """The cluster has too little room now."""

    words: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    host: str  # address of this machine, as the nodes reach it
    places: list[HostPlace]  # by rank
    cpu_threads: int  # of each rank; 0: it has a GPU
    num_neighbours: int = 1  # replicas that share a node's memory


class PlaceFailed(msgspec.Struct, frozen=True, tag=True):
    message: str


class AgentEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank's agent, its actor or its node has ended."""

    rank: int
    words: str


ToRelay = NoRoomYet | Placed | PlaceFailed | AgentEnded

# ── a relay and the supervisor ──────────────────────────────────────────────────────────────────────


class EnginePlace(msgspec.Struct, frozen=True, tag=True):
    """Where an engine is, or what it waits for."""

    words: str
    is_waiting: bool = False  # for room: it is not starting yet


class EngineEnd(msgspec.Struct, frozen=True, tag=True):
    """An engine on a node has ended."""

    code: int  # negative: a signal's number
    words: str = ""  # what happened, if it is more than the code says


FromRelay = EnginePlace | EngineEnd | EngineReport

# ── a relay and an agent ────────────────────────────────────────────────────────────────────────────


class AgentHello(msgspec.Struct, frozen=True):
    """What an agent says of itself when it connects."""

    rank: int
    channel: Literal["data", "signs"]
    boot: str = ""  # of its machine: processes with the same one share a clock


class RunEngine(msgspec.Struct, frozen=True, tag=True):
    """To the first rank's agent."""

    launch: bytes  # an EngineLaunch as JSON
    replica: int  # block of the heartbeat memory
    clock_offset: int  # nanoseconds to subtract from its machine's clock
    cpu_threads: int
    num_neighbours: int
    places: list[HostPlace]


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    pass


class LogText(msgspec.Struct, frozen=True, tag=True):
    """Whole lines that a process on the node wrote to its standard error."""

    text: bytes


AgentMessage = RunEngine | RunRank | RankEnded | StopEngine | LogText | EngineReport | EngineEnd

# The data channel carries these and the engine's own messages. The first byte says which.
CONTROL = b"c"
TO_ENGINE = b"e"  # followed by a message for the engine
TO_API = b"a"  # followed by the length of a name (one byte), the name of an API process's address, and a message for it
# The signs' channel: what an engine's shared memory holds, and questions about the clock.
HEARTBEAT = b"h"
HISTORY = b"y"
ASK_TIME = b"?"
TIME = b"t"
