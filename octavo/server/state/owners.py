"""Owners: which API key may see what another request made: files, batches, journeys, resumable streams, stored responses.

The owner of a thing is a digest of the key whose request made it. Files and batches keep it on disk, so the digest is salted; the
salt lies beside them. Things without an owner were made while the server had no key, or by an older version."""

import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from octavo.config import Config

NO_OWNER = b""
SALT_FILE = "owners.salt"
SALT_BYTES = 16
OWNER_BYTES = 16


class Viewer(NamedTuple):
    """A key that asks for something."""

    owner: bytes  # the owner of what it makes
    sees_all: bool

    def may_see(self, owner: bytes) -> bool:
        """Whether a thing of `owner` exists for this key."""
        return self.sees_all or owner == self.owner

    @property
    def only(self) -> bytes | None:
        """The owner whose things it sees. None: it sees all."""
        return None if self.sees_all else self.owner


EVERYTHING = Viewer(NO_OWNER, True)


class Owners:
    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = (), salt: bytes = b"") -> None:
        """`keys`: all that are accepted, admin keys included."""
        self._salt = salt
        accepted = {self.of(key.encode()) for key in keys}
        self._admins = {self.of(key.encode()) for key in admin_keys}
        # A single key is everybody's: there is nothing to hide from it.
        self._see_all = accepted if len(accepted) == 1 else self._admins
        self._has_keys = bool(accepted)
        self.has_several = len(accepted) > 1  # keys, which must not see each other's text

    def of(self, key: bytes) -> bytes:
        """The owner of what this key makes."""
        return hashlib.blake2b(key, digest_size=OWNER_BYTES, key=self._salt, person=b"octavo owner").digest()

    def viewer(self, owner: bytes) -> Viewer:
        return Viewer(owner, not self._has_keys or owner in self._see_all)

    def is_admin(self, owner: bytes) -> bool:
        """Whether the key with this owner may change what all clients share. A single key may not: all clients may have it."""
        return not self._has_keys or owner in self._admins

    def may_see(self, viewer: bytes, owner: bytes) -> bool:
        """Whether the key with owner `viewer` may see a thing of `owner`."""
        return self.viewer(viewer).may_see(owner)


def owners_of(config: Config) -> Owners:
    """The owners of a server with this configuration. Its API processes, and the next server on the same folder, agree on them."""
    keys, folder = config.server.api_keys, config.batches.files_folder
    salt = _salt(Path(folder)) if keys and folder else b""
    return Owners(keys, config.server.admin_keys, salt)


def _salt(folder: Path) -> bytes:
    """The folder's salt, made by the first process that asks for it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(folder / SALT_FILE, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        salt = file.read(SALT_BYTES)
        if len(salt) < SALT_BYTES:  # new, or its maker was killed before it had written it
            salt = os.urandom(SALT_BYTES)
            os.pwrite(file.fileno(), salt, 0)
        return salt
