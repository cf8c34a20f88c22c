"""The folder that a server's sockets lie in: made for one run, removed after it, and if nobody was left to do that, by the next;
and the folder of its files, there too unless another is given. Knows nothing of what lies in them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from octavo.config import Config, replace
from octavo.errors import ConfigError

_PREFIX = "octavo-"
_LOCK = "lock"
_MAX_LEN = 80  # a socket's path has room for about a hundred characters


class RuntimeDir:
    """Only this user can enter it. It is in use for as long as this process lives: the lock says so."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(str(self.path)) > _MAX_LEN:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        # Locked before it has its name: whoever finds a lock that is free has found what nobody uses.
        fresh = self.path / "new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> int:
    """Folders of servers all of whose processes were killed at once. → how many."""
    count = 0
    for place in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
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
    """The configuration with a folder for files, which every API process sees: the one given, or one that ends with the server.
    Raises ConfigError where it cannot be written, or another server has it."""
    given = config.batches.files_folder
    folder = Path(given).resolve() if given else temporary / "files"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "server.lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--files-folder {given} is used by another server: give each its own") from None
        except OSError as error:
            raise ConfigError(
                f"--files-folder {given} cannot be used ({error.strerror}): name another folder"
            ) from None
        yield replace(config, files_folder=str(folder))
