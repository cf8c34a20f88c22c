"""The file store and batch store that the endpoints of this process share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from octavo.config import BatchConfig, Config
from octavo.errors import Unsupported
from octavo.server.batch.batches import BatchStore
from octavo.server.batch.files import FileStore
from octavo.server.state.owners import Owners


@dataclass(frozen=True, slots=True)
class Stores:
    root: Path  # of what servers that share the files do not share
    files: FileStore
    batches: BatchStore


class StoreHost(Protocol):
    """The server, as far as files and batches are concerned: one model's, or the gateway of several."""

    @property
    def config(self) -> Config: ...

    @property
    def owners(self) -> Owners: ...

    @property
    def body_limits(self) -> dict[str, int]:
        """Route → bytes, where it takes more than --max-body-bytes."""

    def accept(self) -> None:
        """Raise EngineUnavailable unless new work is accepted."""


def open_stores(service: StoreHost) -> Callable[[], Stores]:
    """Return a function that gives the stores. It raises Unsupported if this process has no folder for them."""
    config = service.config.batches
    if not config.files_folder:

        def refuse() -> Stores:
            raise Unsupported("files and batches are not available: this server has no folder for them")

        return refuse
    stores = make_stores(config)
    return lambda: stores


def make_stores(config: BatchConfig) -> Stores:
    own = Path(config.own_folder)
    files = FileStore(Path(config.files_folder), config.file_limit, int(config.max_files_bytes), config.max_files)
    return Stores(own, files, BatchStore(own))
