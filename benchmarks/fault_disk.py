"""FaultDisk: a folder on a disk that is slow, fails or hangs on command. A FUSE file system over another folder, in a process of
its own; it needs /dev/fuse, the right to mount, libfuse and the package mfusepy.

    with FaultDisk(backing, mount) as disk:
        disk.set("slow reads")"""

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

MODES = ("well", "slow reads", "slow writes", "read errors", "write errors", "hangs")
SLOW_SECONDS = 1.0  # that each read or write takes
START_SECONDS = 20.0


class FaultDisk:
    """`mount`: an empty folder. What is written there is kept in `backing`."""

    def __init__(self, backing: Path, mount: Path) -> None:
        self.mount = mount
        self._control = backing.with_name(backing.name + "-mode")
        self.set("well")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.fault_disk",
                str(backing),
                str(mount),
                str(self._control),
            ]
        )

    def set(self, mode: str) -> None:
        assert mode in MODES
        new = self._control.with_suffix(".new")
        new.write_text(mode)
        new.replace(self._control)

    def __enter__(self) -> Self:
        end = time.monotonic() + START_SECONDS
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise SystemExit("benchmarks.fault_disk: cannot mount: needs root, /dev/fuse, libfuse and mfusepy")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.set("well")
        subprocess.run(["umount", "-l", str(self.mount)], check=False)
        self._process.kill()
        self._process.wait(START_SECONDS)


def _serve(backing: str, mount: str, control: str) -> None:
    import mfusepy  # type: ignore[import-not-found, unused-ignore]

    def mode() -> str:
        with open(control) as file:
            return file.read()

    def act(kind: str) -> None:
        """What a read, a write or another operation (`kind`) meets now."""
        while (now := mode()) == "hangs":
            time.sleep(0.05)
        if now == f"slow {kind}s":
            time.sleep(SLOW_SECONDS)
        elif now == f"{kind} errors":
            raise mfusepy.FuseOSError(errno.EIO)

    class Through(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            act("look")
            found = os.fstat(fh) if fh is not None else os.lstat(backing + path)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
            times = {f"st_{each}": getattr(found, f"st_{each}_ns") for each in ("atime", "mtime", "ctime")}
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            act("look")
            return [".", "..", *os.listdir(backing + path)]

        def open(self, path: str, flags: int) -> int:
            act("look")
            return os.open(backing + path, flags)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            act("write")
            return os.open(backing + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            act("read")
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            act("write")
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            act("look")
            os.truncate(backing + path, length)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            act("write")

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
            act("look")
            with contextlib.suppress(FileNotFoundError):
                os.utime(backing + path, ns=times) if times else os.utime(backing + path)

        def statfs(self, path: str) -> dict[str, int]:
            act("look")
            found = os.statvfs(backing + path)
            names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize", "f_namemax")
            return {name: getattr(found, name) for name in names}

        def mkdir(self, path: str, mode: int) -> None:
            act("look")
            os.mkdir(backing + path, mode)

        def rmdir(self, path: str) -> None:
            act("look")
            os.rmdir(backing + path)

        def unlink(self, path: str) -> None:
            act("write")
            os.unlink(backing + path)

        def rename(self, old: str, new: str) -> None:
            act("write")
            os.rename(backing + old, backing + new)

        def link(self, target: str, source: str) -> None:
            act("write")
            os.link(backing + source, backing + target)

        def chmod(self, path: str, mode: int) -> None:
            act("look")
            os.chmod(backing + path, mode)

    run: Callable[..., Any] = mfusepy.FUSE
    run(Through(), mount, foreground=True, direct_io=True, attr_timeout=0, entry_timeout=0)


if __name__ == "__main__":
    _serve(*sys.argv[1:4])
