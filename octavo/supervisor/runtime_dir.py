"""The folder of a server's sockets, made for one run and removed after it, or by the next server if all processes were killed;
and the folder of its files, inside the first unless --files-folder names another."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from octavo.config import Config, replace
from octavo.errors import ConfigError

_PREFIX = "octavo-"
_LOCK = "lock"
_RECORD = "server.json"
_FILES_LOCK = "server.lock"
PART_SECONDS = 10.0  # that another server has to leave a part of --files-folder
SHARED_TEMPORARY = Path("/tmp")  # its name is short everywhere
_MAX_LEN = 80  # a UNIX socket's path may have about a hundred characters


class ServerRecord(msgspec.Struct, frozen=True):
    """A server that takes requests."""

    pid: int  # of its supervisor
    url: str
    model: str
    started: float  # time.time()
    is_inner: bool = False  # one model of a gateway, which has a record of its own


class RuntimeDir:
    """A folder that only this user can enter. A lock file, held for as long as this process lives, marks it as in use."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(str(self.path)) > _MAX_LEN:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_TEMPORARY))
        # Locked before it gets its name, so a lock file that is not locked always belongs to an abandoned folder.
        fresh = self.path / "new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def write_record(folder: Path, record: ServerRecord) -> None:
    """Announce a server to `octavo ps`. `folder`: its RuntimeDir's."""
    fresh = folder / f"{_RECORD}.new"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.rename(folder / _RECORD)


def running_servers(*, with_inner: bool = False) -> list[ServerRecord]:
    """This user's servers on this machine, the oldest first. `with_inner`: also those that clients reach through a gateway."""
    found = []
    for place in {Path(tempfile.gettempdir()), SHARED_TEMPORARY}:
        for path in place.glob(f"{_PREFIX}*/{_RECORD}"):
            with contextlib.suppress(OSError, ValueError):  # another user's, or removed meanwhile
                if path.stat().st_uid == os.getuid() and _is_locked(path.parent / _LOCK):
                    record = msgspec.json.decode(path.read_bytes(), type=ServerRecord)
                    if with_inner or not record.is_inner:
                        found.append(record)
    return sorted(found, key=lambda record: record.started)


def _is_locked(lock: Path) -> bool:
    """Whether the process that made the folder lives."""
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_abandoned() -> int:
    """Remove the folders of servers all of whose processes were killed at once. Returns how many."""
    count = 0
    for place in {Path(tempfile.gettempdir()), SHARED_TEMPORARY}:
        for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError):  # another user's, in use, or removed meanwhile
                fd = os.open(lock, os.O_RDWR)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                    count += 1
                finally:
                    os.close(fd)
    return count


@contextlib.contextmanager
def files_folder(config: Config, temporary: Path) -> Iterator[Config]:
    """Yield the configuration with a folder for files that all API processes share: the given one, or a temporary one that is
    removed with the server. Raises ConfigError if the folder cannot be written or another server uses it, or its part of it."""
    given = config.batches.files_folder
    folder = Path(given).resolve() if given else temporary / "files"
    config = replace(config, files_folder=str(folder))
    part = config.batches.files_part
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(config.batches.own_folder).mkdir(mode=0o700, exist_ok=True)
            whole = stack.enter_context((folder / _FILES_LOCK).open("ab"))
            fcntl.flock(whole, (fcntl.LOCK_SH if part else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if part:
                own = stack.enter_context((Path(config.batches.own_folder) / _FILES_LOCK).open("ab"))
                _lock_soon(own)
        except BlockingIOError:
            what = f", part {part}," if part else ""
            raise ConfigError(f"--files-folder {given}{what} is used by another server: give each its own") from None
        except OSError as error:
            raise ConfigError(
                f"--files-folder {given} cannot be used ({error.strerror}): name another folder"
            ) from None
        yield config


def _lock_soon(file: IO[bytes]) -> None:
    """Lock a file. A server whose gateway was killed may be ending just now: it gets some time. Raises BlockingIOError."""
    until = time.monotonic() + PART_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
