"""TierFolder: runs of KV pages in a folder, within a limit of bytes. The files are the truth: what is known of them is read from them, at
the start and now and then, and a file that is gone or bad is a miss. Several engines may use one folder at the same time: each writes
files of its own, and any may delete any.

FOLDER/secret         the root of page keys comes from it; without it, a key reveals nothing about its tokens
FOLDER/LAYOUT/*.kv    runs of pages of one layout; the time of the last use is the file's time
FOLDER/LAYOUT/*.part  a run that is being written"""

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.kv_tier.run_file import BadRun, Buffers, RunHeader, checksum, read_header, read_pages, write_run

log = logging.getLogger("octavo.engine")

SECRET_BYTES = 32
RUN, PART = ".kv", ".part"
PART_SECONDS = 600.0  # after which a run that is still being written is taken for what a dead engine left
LOOK_SECONDS = 5.0  # between two looks at what other engines have written or deleted
COMPLAIN_SECONDS = 60.0  # between two log lines about bad files


class TierChanges(NamedTuple):
    """Keys that pages were found or stored for, and keys whose pages are gone."""

    stored: list[bytes]
    dropped: list[bytes]


class _Run(NamedTuple):
    header: RunHeader
    num_bytes: int


def folder_secret(folder: Path) -> bytes:
    """Make the folder if it does not exist, for its owner alone, and return its secret. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(
                f"--kv-tier: {folder} is not a folder of this user: give one that is, or that does not exist"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)  # pages can be turned back into the prompts that they were computed from
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                secret = (folder / "secret").read_bytes()
                if len(secret) == SECRET_BYTES:
                    return secret
                (folder / "secret").unlink()  # torn when the machine lost power: all pages become foreign
            _make_secret(folder)
        return (folder / "secret").read_bytes()
    except OSError as error:
        raise ConfigError(f"--kv-tier: {folder} cannot be used: {error.strerror or error}") from None


def _make_secret(folder: Path) -> None:
    part = folder / f"secret-{secrets.token_hex(8)}"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_bytes(SECRET_BYTES))
        os.fsync(file)
        with contextlib.suppress(FileExistsError):  # another engine was faster
            os.link(part, folder / "secret")
    finally:
        os.close(file)
        part.unlink()


class TierFolder:
    """One thread may read() while another look()s, writes or deletes."""

    def __init__(
        self, folder: Path, max_bytes: int, layout: str, page_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`layout`: a name for what the bytes of a page mean: pages of other layouts are not touched, except to make room."""
        self._root, self._folder = folder, folder / layout
        self._max_bytes, self._layout, self._page_bytes, self._clock = max_bytes, layout, page_bytes, clock
        self._runs: dict[str, _Run] = {}  # by name of the file
        self._places: dict[bytes, tuple[str, int]] = {}  # key → file, and which page of it
        self._known_bad: set[str] = set()
        self.num_bytes = 0  # in the whole folder, as of the last look
        self.num_bad = 0  # files that were torn, foreign or damaged
        self.num_evicted = 0  # files that made room for others
        self._complained = -COMPLAIN_SECONDS
        self._lock = threading.Lock()  # of what is known of files, not held while a file is read or written
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def look(self) -> TierChanges:
        """Read the headers of files that are new, and forget files that are gone. Raises OSError where the folder cannot be read."""
        stored: list[bytes] = []
        dropped: list[bytes] = []
        present: set[str] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(PART):
                    self._drop_old_part(entry)
                elif entry.name.endswith(RUN):
                    present.add(entry.name)
                    if entry.name not in self._runs and entry.name not in self._known_bad:
                        stored += self._open(entry.name)
        with self._lock:
            gone = self._runs.keys() - present
        for name in gone:
            dropped += self._forget(name)
        self._known_bad &= present
        self.num_bytes = sum(size for _, size, _ in self._all_files())
        return TierChanges(stored, dropped)

    def write(self, keys: Sequence[bytes], pages: Sequence[Buffers]) -> TierChanges:
        """Store a run of pages, and delete what has not been used for longest where there is no room. Raises OSError: nothing was
        stored."""
        sums = [checksum(key, page) for key, page in zip(keys, pages, strict=True)]
        header = RunHeader(self._layout, self._page_bytes, list(keys), sums)
        if header.num_bytes > self._max_bytes:
            return TierChanges([], [])
        dropped = self._make_room(header.num_bytes)
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}"
        part = self._folder / (name + PART)
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_run(file, header, pages)
            os.rename(part, self._folder / (name + RUN))
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            os.close(file)
        self.num_bytes += header.num_bytes
        self._add(name + RUN, header)
        return TierChanges(list(keys), dropped)

    def read(self, keys: Sequence[bytes], pages: Sequence[Buffers]) -> tuple[int, TierChanges]:
        """Read the pages of these keys, in order. Returns how many are there and whole, from the first on, and what was found to be
        gone. A file that cannot be read, or is damaged, is forgotten and deleted."""
        dropped: list[bytes] = []
        done = 0
        while done < len(keys):
            with self._lock:
                name, first = self._places.get(keys[done], ("", 0))
                run = self._runs.get(name)
            if run is None:
                break
            run_keys = run.header.keys
            count = 1
            while (
                done + count < len(keys)
                and first + count < len(run_keys)
                and run_keys[first + count] == keys[done + count]
            ):
                count += 1
            whole = self._read_from(name, run.header, first, pages[done : done + count], len(keys) - done)
            done += whole
            if whole < count:
                dropped += self._forget(name)
                break
        return done, TierChanges([], dropped)

    def delete_all(self) -> TierChanges:
        """Delete every run of this layout."""
        dropped: list[bytes] = []
        self.look()
        with self._lock:
            names = list(self._runs)
        for name in names:
            self._delete(self._folder / name)
            dropped += self._forget(name)
        return TierChanges([], dropped)

    def has(self, key: bytes) -> bool:
        return key in self._places

    # ── files ──

    def _open(self, name: str) -> list[bytes]:
        """Keys of a file that is new here."""
        try:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._known_bad.add(name)
            return []
        try:
            header = read_header(file)
            if header.layout != self._layout or header.page_bytes != self._page_bytes:
                raise BadRun("its pages have another layout")
        except (BadRun, OSError) as error:
            self._reject(name, str(error))
            return []
        finally:
            os.close(file)
        return self._add(name, header)

    def _add(self, name: str, header: RunHeader) -> list[bytes]:
        with self._lock:
            self._runs[name] = _Run(header, header.num_bytes)
            new = [key for key in header.keys if key not in self._places]
            for number, key in enumerate(header.keys):
                self._places.setdefault(key, (name, number))
        return new

    def _read_from(self, name: str, header: RunHeader, first: int, pages: Sequence[Buffers], depth: int) -> int:
        """How many of these pages of a file are whole. `depth`: pages from here to the end of the prefix; deeper parts get an older time, so
        that a prefix is deleted from its end on."""
        path = self._folder / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._reject(name, error.strerror or str(error))
            return 0
        try:
            whole = read_pages(file, header, first, pages)
            now = self._clock() + 1e-6 * depth
            with contextlib.suppress(OSError):
                os.utime(file, (now, now))
        except OSError as error:
            self._reject(name, error.strerror or str(error))
            return 0
        finally:
            os.close(file)
        if whole < len(pages):
            self._reject(name, f"page {first + whole} is damaged")
        return whole

    def _reject(self, name: str, why: str) -> None:
        """Count a bad file, say so now and then, and delete it."""
        self.num_bad += 1
        self._known_bad.add(name)
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_SECONDS:
            self._complained = now
            log.warning("%s is not used (%s): its pages are computed again", self._folder / name, why)
        self._delete(self._folder / name)

    def _forget(self, name: str) -> list[bytes]:
        with self._lock:
            run = self._runs.pop(name, None)
            if run is None:
                return []
            gone = [key for key in dict.fromkeys(run.header.keys) if self._places.get(key, ("",))[0] == name]
            for key in gone:
                del self._places[key]
        return gone

    def _make_room(self, num_bytes: int) -> list[bytes]:
        dropped: list[bytes] = []
        if self.num_bytes + num_bytes <= self._max_bytes:
            return dropped
        files = sorted(self._all_files())
        self.num_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            self._delete(path)
            self.num_bytes -= size
            self.num_evicted += 1
            if path.parent == self._folder:
                dropped += self._forget(path.name)
        return dropped

    def _all_files(self) -> list[tuple[tuple[bool, float], int, Path]]:
        """((is of this layout, time of the last use), bytes, path) of all files that count: in ascending order, the first goes first."""
        found: list[tuple[tuple[bool, float], int, Path]] = []
        for folder in self._root.iterdir():
            if not folder.is_dir():
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith((RUN, PART)):
                        with contextlib.suppress(OSError):
                            status = entry.stat()
                            order = (folder == self._folder, status.st_mtime)
                            found.append((order, status.st_size, Path(entry.path)))
        return found

    def _drop_old_part(self, entry: "os.DirEntry[str]") -> None:
        with contextlib.suppress(OSError):
            if self._clock() - entry.stat().st_mtime > PART_SECONDS:
                os.unlink(entry.path)

    @staticmethod
    def _delete(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
