"""BatchStore: the state of every batch, in a folder that all API processes share. One process runs the batches, all read them."""

import contextlib
import re
import time
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from octavo.errors import InvalidRequest, NotFound
from octavo.server.batch.files import FileStore, Owned, new_name, replace_file, unlink_stale
from octavo.server.state.owners import EVERYTHING, NO_OWNER, Viewer

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_BATCHES = 1000
"""Batches that are kept. Beyond that, the oldest ended ones are removed; their files stay."""
_PRIVATE = ("input", "owner")  # files of a batch that has not ended, written before its card; owner: by older versions

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = frozenset(("failed", "completed", "expired", "cancelled"))


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputExpiry(msgspec.Struct, frozen=True):
    seconds: int
    anchor: Literal["created_at"] = "created_at"


class Batch(msgspec.Struct, frozen=True):
    """OpenAI's Batch object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    model: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
    object: Literal["batch"] = "batch"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class _BatchCard(Batch, frozen=True):
    owner: bytes = NO_OWNER


class Unfinished(NamedTuple):
    """A batch that waits or is running."""

    id: str
    is_cancelled: bool


class BatchStore:
    """A batch is a card (ID.json). Until it has ended there are also ID.open; its lines, ID.input, which stay even if the
    uploaded file is deleted; and ID.cancel once its cancellation was requested. The card has the batch's owner: its requests and
    its output files belong to it."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "batches"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(
        self,
        files: FileStore,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        seconds: int,
        metadata: dict[str, str] | None,
        output_expires_after: OutputExpiry | None,
        owner: bytes = NO_OWNER,
    ) -> Batch:
        """Store a new batch. Raises NotFound if the input file does not exist."""
        self._make_room()
        now = int(time.time())
        batch = Batch(
            new_name("batch_"), endpoint, input_file_id, completion_window, now, now + seconds,
            metadata=metadata, output_expires_after=output_expires_after,
        )  # fmt: skip
        files.keep(input_file_id, self._path(batch.id, "input"))
        self.save(batch, owner)
        self._path(batch.id, "open").touch()
        return batch

    def get(self, batch_id: str, viewer: Viewer = EVERYTHING) -> Batch:
        """The batch as clients see it, with a requested cancellation. Raises NotFound."""
        batch, _ = self.load(batch_id, viewer)
        return batch if batch.has_ended else self._as_asked(batch)

    def load(self, batch_id: str, viewer: Viewer = EVERYTHING) -> tuple[Batch, bytes]:
        """The batch as the runner last saved it, and its owner. Raises NotFound, also for a batch of another key."""
        if BATCH_ID.fullmatch(batch_id):
            with contextlib.suppress(FileNotFoundError):
                card = self._path(batch_id, "json").read_bytes()
                owner = msgspec.json.decode(card, type=Owned).owner
                if viewer.may_see(owner):
                    return msgspec.json.decode(card, type=Batch), owner
        raise NotFound(f"no such batch: {batch_id[:60]!r}", param="batch_id")

    def newest_first(self, viewer: Viewer = EVERYTHING) -> list[Batch]:
        names = sorted((path.stem for path in self._folder.glob("batch_*.json")), reverse=True)
        batches = []
        for name in names:
            with contextlib.suppress(NotFound):
                batches.append(self.get(name, viewer))
        return batches

    def cancel(self, batch_id: str, viewer: Viewer = EVERYTHING) -> Batch:
        """Request cancellation; the runner will notice. Raises NotFound, or InvalidRequest if the batch has ended."""
        batch = self.get(batch_id, viewer)
        if batch.has_ended:
            raise InvalidRequest(f"batch {batch.id} has ended: its status is {batch.status}", param="batch_id")
        self._path(batch_id, "cancel").touch()
        return self.get(batch_id)

    def save(self, batch: Batch, owner: bytes) -> None:
        card = _BatchCard(**msgspec.structs.asdict(batch), owner=owner)
        replace_file(self._path(batch.id, "json"), msgspec.json.encode(card))

    def end(self, batch: Batch, owner: bytes) -> None:
        assert batch.has_ended
        self.save(batch, owner)
        self.forget(batch.id)

    def forget(self, batch_id: str) -> None:
        """Remove the files that mark the batch as unfinished."""
        for kind in (*_PRIVATE, "cancel", "open"):
            self._path(batch_id, kind).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove old files of batches whose creation was never completed."""
        unfinished = {batch.id for batch in self.unfinished()}
        for path in (path for kind in _PRIVATE for path in self._folder.glob(f"batch_*.{kind}")):
            if path.stem not in unfinished:
                unlink_stale(path)

    def unfinished(self) -> list[Unfinished]:
        """Batches that have not ended, oldest first."""
        names = sorted(path.stem for path in self._folder.glob("batch_*.open"))
        return [Unfinished(name, self._path(name, "cancel").exists()) for name in names]

    def open_input(self, batch_id: str) -> BinaryIO:
        """Open the batch's lines. Raises FileNotFoundError if the file was removed from the folder."""
        return self._path(batch_id, "input").open("rb")

    def outputs(self, batch_id: str) -> tuple[Path, Path]:
        """Paths of the records written so far: answers, errors."""
        return self._path(batch_id, "output"), self._path(batch_id, "errors")

    def _as_asked(self, batch: Batch) -> Batch:
        try:
            asked = int(self._path(batch.id, "cancel").stat().st_mtime)
        except FileNotFoundError:
            return batch
        return msgspec.structs.replace(batch, status="cancelling", cancelling_at=asked)

    def _make_room(self) -> None:
        names = sorted(path.stem for path in self._folder.glob("batch_*.json"))
        unfinished = {batch.id for batch in self.unfinished()}
        ended = [name for name in names if name not in unfinished]
        excess = len(names) + 1 - MAX_BATCHES
        if excess > len(ended):
            raise InvalidRequest(
                f"{len(unfinished)} batches are waiting or running; this server accepts at most {MAX_BATCHES}"
            )
        for name in ended[: max(0, excess)]:
            self._path(name, "json").unlink(missing_ok=True)

    def _path(self, batch_id: str, kind: str) -> Path:
        return self._folder / f"{batch_id}.{kind}"
