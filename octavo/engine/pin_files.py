"""PinFiles: pinned prefixes in the server's own folder, a file each, so that the next engine of this server has them
when one dies. They are removed with the server."""

import contextlib
import logging
import os
from hashlib import blake2b
from pathlib import Path

import msgspec

from octavo.messages.prefixes import HoldPrefix

log = logging.getLogger("octavo.engine")

MAX_TRIES = 2  # engines that have ended while they computed a prefix again; after these it is left to its clients


class SavedPin(msgspec.Struct, frozen=True):
    wish: HoldPrefix
    until: float  # CLOCK_MONOTONIC seconds; infinite: until it is unpinned
    tries: int = 0  # times that an engine has begun to compute it again, and has not reported its end


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedPin).decode


class PinFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[SavedPin]:
        """All that were saved, the oldest first. A file that cannot be read is left out."""
        found: list[tuple[int, SavedPin]] = []
        with contextlib.suppress(OSError):  # the first engine has no folder yet
            for path in self._folder.iterdir():
                try:
                    found.append((path.stat().st_mtime_ns, _decode(path.read_bytes())))
                except (OSError, ValueError, RecursionError):  # of msgspec, and where a text is not UTF-8
                    log.warning("a pinned prefix could not be read again: %s", path.name)
        return [pin for _, pin in sorted(found, key=lambda each: each[0])]

    def save(self, pin: SavedPin) -> None:
        """Whole or not at all. A disk that refuses costs the pin its next engine, and nothing else."""
        path = self._path(pin.wish.owner, pin.wish.name)
        fresh = path.parent.with_name(f"{path.parent.name}.new")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_encode(pin))
            fresh.rename(path)
        except OSError as error:
            log.warning("a pinned prefix would be lost with this engine: %s", error.strerror or error)

    def delete(self, owner: bytes, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(owner, name).unlink()

    def _path(self, owner: bytes, name: str) -> Path:
        digest = blake2b(msgspec.msgpack.encode((owner, name)), digest_size=16)
        return self._folder / digest.hexdigest()
