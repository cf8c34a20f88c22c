"""The files of recordings: the folder that a running server's engines write to, and the file made of it when an engine ends.

RECORDINGS/live-PID-…/ belongs to a running server, which holds its lock for as long as it lives. RECORDINGS/crash-….octavo holds
what led to an engine's end, RECORDINGS/stopped-….octavo what was recorded before an orderly stop. The last MOST_KEPT files of
each kind are kept."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.config import RecorderConfig
from octavo.errors import ConfigError
from octavo.ipc.stderr import say
from octavo.recording.format import SEGMENT, FileChunk, chunks_in, stream_chunk
from octavo.recording.recorder import SEGMENTS
from octavo.recording.ring import SIZE, RecordingRing, shared_ring
from octavo.weights.sources.source import cache_folder

MOST_KEPT = 5  # files of each kind
LEAST_BYTES = SEGMENTS * SIZE  # so that one ring of records never fills more than one segment file
_LIVE = "live-"
_LOCK = "lock"
SUFFIX = ".octavo"


class _RingContents(NamedTuple):
    """The contents of the ring: the records that an engine may not have written to its files."""

    position: int  # of the first byte in the engine's stream
    records: bytes


class CrashFiles:
    """A server's recordings. If the default folder cannot be used, a warning is logged and nothing is recorded; with a folder
    named by --record-folder that is an error."""

    def __init__(self, config: RecorderConfig) -> None:
        self._is_named = bool(config.record_folder)
        self._ring_fd = -1
        self._lock: int | None = None
        self._sealing = threading.Lock()  # one engine's files at a time
        self._sealers: list[threading.Thread] = []
        self.live_folder: Path | None = None  # None: nothing is recorded
        self._what = "with token ids" if config.record_tokens else "without any text"
        if not (num_bytes := int(config.record_bytes)):
            return
        if num_bytes < LEAST_BYTES:
            raise ConfigError(f"--record-bytes must be 0 or at least {LEAST_BYTES // 2**20}M, got {num_bytes}")
        try:
            self._folder = Path(config.record_folder) if self._is_named else cache_folder() / "recordings"
            self._folder = self._folder.absolute()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._seal_abandoned()
            self._begin()
        except (OSError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else error.message
            if self._is_named:
                raise ConfigError(
                    f"--record-folder {config.record_folder} cannot be used ({why}): name another folder"
                ) from None
            say(f"nothing will be recorded for octavo replay ({why}): name a folder with --record-folder")
            return

    @property
    def status_line(self) -> str:
        """The line that the server logs at start."""
        if self.live_folder is None:
            return "recorder: off"
        return f"recorder: the scheduler's inputs, {self._what}, in {self.live_folder} (--record-bytes)"

    @property
    def ring_fds(self) -> tuple[int, ...]:
        """The ring's descriptor, for an engine to inherit. Empty: nothing is recorded."""
        return (self._ring_fd,) if self._ring_fd >= 0 else ()

    def seal_in_background(self, engine: int) -> None:
        """Make one file of a crashed engine's recording and log its name, on a thread: clients wait for the next engine and must
        not wait for a disk. The next engine may start at once: the ring, which it overwrites, is copied before this returns."""
        if self.live_folder is not None:
            sealer = threading.Thread(target=self._seal_crash, args=(engine, self._read_ring()), name="octavo-seal")
            try:
                sealer.start()
            except RuntimeError:  # no more threads: possible right after a crash
                sealer.run()
                return
            self._sealers = [*(other for other in self._sealers if other.is_alive()), sealer]

    def wait(self, seconds: float) -> None:
        """Wait until the files of crashed engines are made, at most so long."""
        deadline = time.monotonic() + seconds
        for sealer in self._sealers:
            sealer.join(max(0.0, deadline - time.monotonic()))

    def _seal_crash(self, engine: int, contents: _RingContents | None) -> None:
        if (path := self._seal_own("crash", engine, contents)) is not None:
            say(f"the engine's recording is kept: octavo replay {path}")

    def _seal_own(self, why: str, engine: int, contents: _RingContents | None) -> Path | None:
        """Make one file of an engine's segments. None: there are none, or the file could not be written."""
        assert self.live_folder is not None
        try:
            with self._sealing:
                return self._seal(self.live_folder, f"{engine:03d}", why, contents)
        except OSError as error:
            say(f"the engine's recording could not be kept: {error.strerror}")
            return None

    def _read_ring(self) -> _RingContents | None:
        try:
            ring = RecordingRing(self._ring_fd)
        except OSError as error:  # out of memory, for example
            say(f"the engine's last records could not be read: {error.strerror}")
            return None
        try:
            return _RingContents(ring.tail, ring.between(ring.tail, ring.head))
        finally:
            ring.close()

    def close(self, engine: int) -> None:
        """Remove the live folder. If --record-folder was given, keep the recording as a file first."""
        for sealer in self._sealers:
            sealer.join()
        if self.live_folder is not None:
            if self._is_named and (path := self._seal_own("stopped", engine, self._read_ring())) is not None:
                say(f"the recording up to the stop is kept: octavo replay {path}")
            shutil.rmtree(self.live_folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        if self._ring_fd >= 0:
            os.close(self._ring_fd)
        self.live_folder, self._lock, self._ring_fd = None, None, -1

    def _begin(self) -> None:
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=self._folder))
        live_folder = self._folder / fresh.name.replace("new-", f"{_LIVE}{os.getpid()}-", 1)
        # Locked before it gets its name, so a lock file that is not locked always belongs to an abandoned folder.
        self._lock = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(live_folder)
        self._ring_fd = shared_ring()
        self.live_folder = live_folder

    def _seal_abandoned(self) -> None:
        """Make files of the recordings of servers all of whose processes were killed at once."""
        for lock in self._folder.glob(f"{_LIVE}*/{_LOCK}"):
            with contextlib.suppress(OSError):  # another user's, in use, or removed meanwhile
                fd = os.open(lock, os.O_RDWR)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    engines = {file.name.split("-")[0] for file in lock.parent.glob(f"*{SEGMENT}")}
                    for engine in sorted(engines):
                        path = self._seal(lock.parent, engine, "crash", None)
                        say(f"an earlier server was killed; its recording is kept: octavo replay {path}")
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(fd)

    def _seal(self, live_folder: Path, engine: str, why: str, contents: _RingContents | None) -> Path | None:
        """Join an engine's segments and the ring's contents in one file, remove the segments, and remove the oldest files."""
        segments = sorted(live_folder.glob(f"{engine}-*{SEGMENT}"))
        if not segments:
            return None
        when = time.strftime("%Y%m%d-%H%M%S", time.localtime(segments[-1].stat().st_mtime))
        target = self._folder / f"{why}-{when}-server-{live_folder.name.split('-')[1]}-engine-{int(engine)}{SUFFIX}"
        part = target.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            # Private to this user from the start; never through an existing file or link.
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                for segment in segments:
                    with segment.open("rb") as source:
                        shutil.copyfileobj(source, file)
                if contents is not None:
                    _append_ring(file, segments[-1], contents)
            part.rename(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        for segment in segments:
            segment.unlink(missing_ok=True)
        old = sorted(self._folder.glob(f"{why}-*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in old[:-MOST_KEPT]:
            path.unlink(missing_ok=True)
        return target


def _append_ring(file: BinaryIO, last: Path, contents: _RingContents) -> None:
    """Append the ring's records that are not in the last segment: the engine may have ended between writing a chunk and moving
    `tail`. If records are missing in between, append nothing: a reader keeps only what follows the last gap, and would lose the
    segments."""
    ends = [chunk.end for chunk in chunks_in(last.read_bytes()) if isinstance(chunk, FileChunk)]
    if ends and contents.position > ends[-1]:
        return
    start = max(ends[-1] if ends else 0, contents.position)
    if unwritten := contents.records[start - contents.position :]:
        file.write(stream_chunk(unwritten, start))
