"""What the supervisor tells an engine process, in one line.
Knows nothing of what either of them does."""

from typing import Literal

import msgspec

from octavo.config import Config


class EngineLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process to be."""

    config: Config
    model_path: str
    model_kind: Literal["folder", "gguf"]
    model_name: str  # the model's own
    served_name: str  # what clients call it
    address: str  # where to listen for API processes
    num_servers: int = 0  # API processes that will say hello
    heartbeat_fd: int = -1  # inherited memory; see octavo.ipc.heartbeat
    number: int = 1  # of this server's engines
    record_to: str = ""  # folder; empty: nothing is recorded
    ring_fd: int = -1  # inherited memory; see octavo.recording.ring


class Patience(msgspec.Struct, frozen=True):
    """Seconds that clients get."""

    request: float = 60.0  # for a request's head, and for each KiB of its body
    reader: float = 300.0  # to take any of what was written to them
    farewell: float = 5.0  # the same, when the server is told to stop and has nothing else to wait for


class ApiLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an API process to be."""

    config: Config
    fd: int  # a socket, inherited, over which connections come: see octavo.supervisor.acceptor
    origin: int
    engine_address: str
    reply_address: str
    model_path: str
    model_name: str
    default_sampling: dict[str, float] = {}  # for requests that say nothing, where the model's files say nothing either
    orders_address: str = ""  # where the supervisor speaks of engines; empty: there is one, for ever
    heartbeat_fd: int = -1  # inherited memory; see octavo.ipc.heartbeat
    patience: Patience = Patience()
    num_servers: int = 1  # API processes, of which this is one
