"""Downloads one file: what was fetched before is kept and continued, and its checksum is that of the hub."""

import glob
import hashlib
import http.client
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from octavo.errors import ConfigError
from octavo.weights.sources.hub_api import Hub, HubFile, HubTrouble, Repository

PIECE_BYTES = 2**20
MAX_TRIES = 5  # without a new byte
MAX_RETRY_SECONDS = 30.0
PART = ".part"

OnBytes = Callable[[int], None]
"""Bytes of the file that are here. It may raise, which stops the download; what is here is kept."""


class Download:
    def __init__(
        self,
        hub: Hub,
        repository: Repository,
        file: HubFile,
        target: Path,
        on_bytes: OnBytes,
        retry_seconds: float = 1.0,
    ) -> None:
        """`retry_seconds`: before the second try; doubled before each further one."""
        self._hub, self._repository, self._file, self._target = hub, repository, file, target
        self._on_bytes, self._retry_seconds = on_bytes, retry_seconds
        # Named by its content, so that only the same file is continued.
        self._part = target.with_name(f"{target.name}.{(file.sha256 or repository.commit)[:16]}{PART}")
        self._digest = hashlib.sha256()
        self._here = 0  # bytes fetched

    def run(self) -> str:
        """Fetch the file and return its SHA-256. Raises ConfigError, and HubTrouble after MAX_TRIES without a new byte."""
        for other in glob.glob(f"{glob.escape(str(self._target))}.*{PART}"):  # of another version of the file
            if other != str(self._part):
                os.unlink(other)
        with open(self._part, "a+b") as opened:
            if not self._file.sha256:  # without a checksum a continued file could not be trusted
                opened.truncate(0)
            self._read_start(opened)
            self._fetch(opened)
            opened.flush()
            os.fsync(opened.fileno())
        self._check()
        os.replace(self._part, self._target)
        return self._digest.hexdigest()

    def _read_start(self, opened: IO[bytes]) -> None:
        """Feed what was fetched before into the checksum."""
        opened.seek(0)
        while piece := opened.read(PIECE_BYTES):
            self._digest.update(piece)
            self._here += len(piece)

    def _fetch(self, opened: IO[bytes]) -> None:
        num_failed, wait = 0, self._retry_seconds
        while self._here < self._file.num_bytes:
            before = self._here
            try:
                self._fetch_rest(opened)
            except HubTrouble:
                num_failed = num_failed + 1 if self._here == before else 1
                if num_failed >= MAX_TRIES:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, MAX_RETRY_SECONDS)

    def _fetch_rest(self, opened: IO[bytes]) -> None:
        response, start = self._hub.open_file(self._repository, self._file, self._here)
        with response:
            if start != self._here:  # this hub does not resume
                opened.truncate(0)
                self._digest, self._here = hashlib.sha256(), 0
            while self._here <= self._file.num_bytes:
                try:
                    piece = response.read(PIECE_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise HubTrouble(f"{self._ended()} ({reason[:200]})") from None
                if not piece:
                    break
                opened.write(piece)
                self._digest.update(piece)
                self._here += len(piece)
                self._on_bytes(self._here)
        if self._here < self._file.num_bytes:
            raise HubTrouble(self._ended())

    def _ended(self) -> str:
        return f"{self._hub.endpoint} ended {self._file.name} after {self._here} of {self._file.num_bytes} bytes"

    def _check(self) -> None:
        wanted, found = self._file, self._digest.hexdigest()
        if self._here == wanted.num_bytes and wanted.sha256 in ("", found):
            return
        self._part.unlink()
        raise ConfigError(
            f"{wanted.name} as fetched has {self._here} bytes and the SHA-256 {found}; the hub says {wanted.num_bytes} bytes and "
            f"{wanted.sha256 or 'no checksum'}. It was changed on its way, or damaged here, and is removed: pull it again"
        )
