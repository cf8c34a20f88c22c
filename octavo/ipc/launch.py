"""What the supervisor tells an engine process, in one line.
Knows nothing of what either of them does."""

from typing import Literal

import msgspec

from octavo.config import Config


class EngineOrder(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process to be."""

    config: Config
    model_path: str
    model_kind: Literal["folder", "gguf"]
    model_name: str  # the model's own
    served_name: str  # what clients call it
    address: str  # where to listen for API processes
    num_servers: int = 0  # API processes that will say hello
    pulse_fd: int = -1  # inherited memory; see octavo.ipc.heartbeat
    number: int = 1  # of this server's engines
    record_to: str = ""  # folder; empty: nothing is recorded
    box_fd: int = -1  # inherited memory; see octavo.recording.ring
