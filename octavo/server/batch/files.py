"""FileStore: uploaded files and the outputs of batches, in a folder that all API processes share; bounded in bytes and count.
No name on disk comes from a client: all names are made here."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from octavo.errors import InvalidRequest, NotFound, TooLarge
from octavo.server.state.owners import EVERYTHING, NO_OWNER, Viewer

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_FILENAME_LEN = 255
STALE_SECONDS = 24 * 3600
LOOK_EVERY_BYTES = 16 * 2**20
"""Bytes of an upload after which the whole store is measured again: other uploads may be filling it."""

Purpose = Literal["batch", "batch_output"]


class StoredFile(msgspec.Struct, frozen=True):
    """OpenAI's File object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    status: Literal["processed"] = "processed"
    status_details: None = None
    object: Literal["file"] = "file"


class Owned(msgspec.Struct, frozen=True):
    """The member of a stored card that clients do not see: whose it is (state/owners.py)."""

    owner: bytes = NO_OWNER


class _FileCard(StoredFile, frozen=True):
    owner: bytes = NO_OWNER


def new_name(prefix: str) -> str:
    """Make a unique name. Names sort by time."""
    return f"{prefix}{time.time_ns():016x}{os.urandom(8).hex()}"


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content."""
    part = path.with_name(f"{path.name}.{os.getpid()}.new")
    part.write_bytes(data)
    part.replace(path)


def unlink_stale(path: Path) -> None:
    """Remove a file older than STALE_SECONDS: a process that died has left it."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_ctime > STALE_SECONDS:
            path.unlink()


class FileStore:
    def __init__(self, root: Path, max_file_bytes: int, max_total_bytes: int, max_files: int) -> None:
        self.folder = root / "files"
        self._root = root
        self.max_file_bytes = max_file_bytes
        self._max_total_bytes = max_total_bytes
        self._max_files = max_files
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(self) -> "Upload":
        """Begin an upload. Raises InvalidRequest if there is no room for another file."""
        num_files = sum(entry.name.endswith(".json") for entry in os.scandir(self.folder))
        if num_files >= self._max_files:
            raise InvalidRequest(
                f"{num_files} files are stored, and this server keeps at most {self._max_files} (--max-files): delete some"
            )
        self.check_room()
        return Upload(self, new_name("file-"))

    def check_room(self) -> None:
        """Raise InvalidRequest if files, uploads and the records of batches together exceed the limit."""
        # By inode: a batch's input is a hard link to the uploaded file and must not count twice.
        sizes = dict(_size(entry) for entry in _entries_within(self._root))
        used = sum(sizes.values())
        if used > self._max_total_bytes:
            raise InvalidRequest(
                f"the files take {used} bytes, and this server keeps at most {self._max_total_bytes} (--max-files-bytes): "
                "delete some"
            )

    def adopt(
        self, path: Path, file_id: str, filename: str, expires_after: int | None = None, owner: bytes = NO_OWNER
    ) -> None:
        """Turn a batch's output into a file. Idempotent."""
        if not self._data(file_id).exists():
            path.replace(self._data(file_id))
        if not self._card(file_id).exists():
            self._save(file_id, filename, "batch_output", expires_after, owner)

    def get(self, file_id: str, viewer: Viewer = EVERYTHING) -> StoredFile:
        """Raises NotFound, also for a file of another key."""
        if FILE_ID.fullmatch(file_id):
            with contextlib.suppress(FileNotFoundError):
                card = self._card(file_id).read_bytes()
                file = msgspec.json.decode(card, type=StoredFile)
                if file.expires_at is not None and file.expires_at <= time.time():
                    self._remove(file_id)
                elif viewer.may_see(msgspec.json.decode(card, type=Owned).owner):
                    return file
        raise NotFound(f"no such file: {file_id[:60]!r}", param="file_id")

    def open(self, file_id: str, viewer: Viewer = EVERYTHING) -> BinaryIO:
        self.get(file_id, viewer)
        try:
            return self._data(file_id).open("rb")
        except FileNotFoundError:
            raise NotFound(f"no such file: {file_id[:60]!r}", param="file_id") from None

    def keep(self, file_id: str, path: Path) -> None:
        """Link the file's content to `path`, where it stays if the file is deleted or expires. Raises NotFound."""
        self.get(file_id)
        data = self._data(file_id)
        try:
            os.link(data, path)
        except FileNotFoundError:
            raise NotFound(f"no such file: {file_id[:60]!r}", param="file_id") from None
        except OSError:  # a file system without hard links
            shutil.copyfile(data, path)

    def newest_first(self, viewer: Viewer = EVERYTHING) -> list[StoredFile]:
        names = sorted((path.stem for path in self.folder.glob("file-*.json")), reverse=True)
        files = []
        for name in names:
            with contextlib.suppress(NotFound):
                files.append(self.get(name, viewer))
        return files

    def delete(self, file_id: str, viewer: Viewer = EVERYTHING) -> None:
        """Delete a file. Open readers can finish. Raises NotFound."""
        self.get(file_id, viewer)
        self._remove(file_id)

    def tidy(self) -> None:
        """Remove old uploads that were never finished."""
        for path in self.folder.glob("*.part"):
            unlink_stale(path)

    def _remove(self, file_id: str) -> None:
        # The card first: a file without a card does not exist for clients.
        for path in (self._card(file_id), self._data(file_id)):
            path.unlink(missing_ok=True)

    def _save(
        self, file_id: str, filename: str, purpose: Purpose, expires_after: int | None, owner: bytes
    ) -> StoredFile:
        now = int(time.time())
        expires_at = None if expires_after is None else now + expires_after
        file = StoredFile(file_id, self._data(file_id).stat().st_size, now, filename, purpose, expires_at)
        replace_file(self._card(file_id), msgspec.json.encode(_FileCard(**msgspec.structs.asdict(file), owner=owner)))
        return file

    def _data(self, file_id: str) -> Path:
        return self.folder / file_id

    def _card(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.json"


class Upload:
    """A file that is being written. Others see it once `finish` has returned."""

    def __init__(self, store: FileStore, file_id: str) -> None:
        self._store, self._id = store, file_id
        self._path = store.folder / f"{file_id}.part"
        self._file = self._path.open("wb")
        self._num_bytes = 0
        self._next_look = LOOK_EVERY_BYTES

    def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        limit = self._store.max_file_bytes
        if self._num_bytes > limit:
            raise TooLarge(f"the file is over the limit of {limit} bytes (--max-file-bytes)", param="file")
        self._file.write(data)
        if self._num_bytes >= self._next_look:
            self._next_look += LOOK_EVERY_BYTES
            self._store.check_room()

    def finish(self, filename: str, purpose: Purpose, expires_after: int | None, owner: bytes = NO_OWNER) -> StoredFile:
        self._file.close()
        self._store.check_room()
        self._path.replace(self._store.folder / self._id)
        return self._store._save(self._id, filename, purpose, expires_after, owner)

    def discard(self) -> None:
        """Remove the unfinished file. Does nothing after `finish`."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _entries_within(root: Path) -> Iterator["os.DirEntry[str]"]:
    """Files in the folders of `root`, and in those of servers' parts (--files-part), two levels below."""
    for folder in os.scandir(root):
        if folder.is_dir():
            for entry in os.scandir(folder):
                if entry.is_dir():
                    yield from os.scandir(entry)
                else:
                    yield entry


def _size(entry: "os.DirEntry[str]") -> tuple[int, int]:
    """(inode, bytes)"""
    try:
        return entry.inode(), entry.stat().st_size
    except FileNotFoundError:  # deleted meanwhile
        return entry.inode(), 0
