"""What the supervisor writes to the standard input of a process that it starts, as one line of JSON, and how an API process answers."""

import sys
from typing import Literal

import msgspec

from octavo.config import Config
from octavo.messages import ToSupervisor


class FleetMember(msgspec.Struct, frozen=True):
    """An engine's place in a fleet."""

    replica: int
    secret: bytes  # the fleet's: page keys are made from it
    cores: list[int] = []  # that it may use; empty: all


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Where an API process reaches a replica's current engine."""

    replica: int
    epoch: int
    engine_address: str
    reply_address: str
    is_lost: bool = False  # its engine has ended, and another one follows


class PlacedRank(msgspec.Struct, frozen=True):
    """Where one of an engine's ranks is."""

    host: str  # for messages
    local_rank: int
    num_local_ranks: int


class PlacedRanks(msgspec.Struct, frozen=True):
    """An engine's ranks, on nodes that were chosen before it was started."""

    address: str  # of the engine's machine, as the ranks reach it
    secret: bytes
    fd: int  # inherited connection to the agent, which has ranks started
    places: list[PlacedRank]


class EngineLaunch(msgspec.Struct, frozen=True):
    """Start-up parameters of an engine process."""

    config: Config
    model_path: str
    model_kind: Literal["folder", "gguf"]
    model_name: str  # the model's own name
    served_name: str  # the name that clients use
    address: str  # where to listen for API processes
    num_servers: int = 0  # API processes that will send a Hello
    heartbeat_fd: int = -1  # inherited memory; see octavo.ipc.heartbeat
    number: int = 1  # counts this server's engines, from 1
    record_to: str = ""  # folder; empty: nothing is recorded
    ring_fd: int = -1  # inherited memory; see octavo.recording.ring
    history_fd: int = -1  # inherited memory; see octavo.observe.history
    member: FleetMember | None = None  # None: it is the only engine, and no router listens
    ranks: PlacedRanks | None = None  # None: they are its children, or it has one, which runs in its process
    is_patient: bool = False  # on a cluster: wait for room, however long it takes


class Patience(msgspec.Struct, frozen=True):
    """Timeouts for clients, in seconds."""

    request: float = 60.0  # to send a request's head, and each KiB of its body
    reader: float = 300.0  # to read any of the data written to them
    farewell: float = 5.0  # the same while the server is stopping and has nothing else to wait for


class ApiLaunch(msgspec.Struct, frozen=True):
    """Start-up parameters of an API process."""

    config: Config
    fd: int  # inherited socket that passes connections; see octavo.supervisor.acceptor
    origin: int
    engine_address: str
    reply_address: str
    model_path: str
    model_name: str
    default_sampling: dict[str, float] = {}  # for parameters that neither the request nor the model's files set
    supervisor_address: str = ""  # where the supervisor announces engines; empty: the engine is never replaced
    heartbeat_fd: int = -1  # inherited memory; see octavo.ipc.heartbeat
    patience: Patience = Patience()
    num_servers: int = 1  # API processes of this server, including this one
    replicas: list[ReplicaAddress] = []  # of a fleet
    fleet_secret: bytes = b""  # as in FleetMember; empty: there is one engine, and no router
    recording: str = ""  # folder that the engine records to; empty: nothing is recorded, or there are several engines


def tell_supervisor(message: ToSupervisor) -> None:
    """Write a line to standard output, which the supervisor reads. For API processes."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
