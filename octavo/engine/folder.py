"""The folder that a server's sockets lie in: made for one run, removed after it, and if nobody was left to do that, by the next.
Knows nothing of what lies in it."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "octavo-"
_LOCK = "lock"
_MAX_LEN = 80  # a socket's path has room for about a hundred characters


class SocketFolder:
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
