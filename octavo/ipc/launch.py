"""What the supervisor writes to the standard input of a process that it starts, as one line of JSON."""

from typing import Literal

import msgspec

from octavo.config import Config


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
