"""AdapterRegistry: the adapters that requests may name as their model (decision 052).

Those of --lora-modules are there from the start; others are loaded and unloaded while the server runs. The API processes of a server
share the changes in a file of its runtime folder. The engine needs no registry: each request brings where its adapter is, so a new engine,
or another replica, reads it again."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.config import MAX_ADAPTER_NAME, LoraConfig
from octavo.errors import ConfigError, Forbidden, InvalidRequest, NotFound, quote
from octavo.messages import AdapterRef
from octavo.server.state.pools import ADAPTERS
from octavo.weights.adapters.adapter_file import stamp_of
from octavo.weights.adapters.reader_process import AdapterReader

MAX_ADAPTERS = 10_000
MAX_PATH = 4096  # characters: as long as the system's own limit
_FILE, _LOCK = "adapters.json", "adapters.lock"


class _Changes(msgspec.Struct):
    """What was loaded and unloaded since the start."""

    added: dict[str, AdapterRef] = {}
    removed: list[str] = []  # of --lora-modules


class _Broken(NamedTuple):
    """An adapter of --lora-modules whose files cannot be used."""

    stamp: str  # of the files that were read: other files are read again
    why: str


class AdapterRegistry:
    def __init__(self, config: LoraConfig, taken: list[str]) -> None:
        """`taken`: the names of the model itself."""
        self._config, self._taken = config, taken
        self._static = dict(config.modules)
        self._changes = _Changes()
        self._refs: dict[str, AdapterRef | _Broken] = {}  # of --lora-modules, as far as they were asked for
        self._reading = asyncio.Lock()
        self._reader = AdapterReader()
        self._folder: Path | None = None
        self._seen: tuple[int, int] = (0, 0)  # of the file that was read last
        for name in self._static:
            try:
                self._check_name(name, "--lora-modules")
            except InvalidRequest as error:
                raise ConfigError(error.message) from None

    @property
    def is_enabled(self) -> bool:
        return self._config.enable_lora

    def open(self, folder: Path) -> None:
        """Share changes with the other API processes in this folder."""
        self._folder = folder

    def close(self) -> None:
        """End the process that reads adapters, which may be reading one."""
        self._reader.close()

    def names(self) -> list[str]:
        self._read()
        kept = [name for name in self._static if name not in self._changes.removed]
        return [*kept, *(name for name in self._changes.added if name not in kept)]

    async def find(self, name: str) -> AdapterRef | None:
        """None: there is no such adapter. Raises InvalidRequest where its files cannot be read."""
        if not self.is_enabled:
            return None
        self._read()
        if (added := self._changes.added.get(name)) is not None:
            return added
        if name not in self._static or name in self._changes.removed:
            return None
        ref = self._refs.get(name)
        if not isinstance(ref, AdapterRef):
            async with self._reading:  # one at a time: many may ask for an adapter before it was read
                ref = await ADAPTERS.run(self._read_static, name)
        if isinstance(ref, _Broken):
            raise InvalidRequest(f"adapter {quote(name)} cannot be used: {ref.why}", param="model")
        return ref

    def _read_static(self, name: str) -> AdapterRef | _Broken:
        """An adapter of --lora-modules. Files that were found to be broken are not read again before they change."""
        known, path = self._refs.get(name), self._static[name]
        if isinstance(known, AdapterRef):
            return known
        stamp = ""  # there are no files
        with contextlib.suppress(ConfigError):
            stamp = stamp_of(Path(path))
        if known is None or known.stamp != stamp:
            try:
                self._refs[name] = self.describe(name, path)
            except ConfigError as error:
                self._refs[name] = _Broken(stamp, str(error))
        return self._refs[name]

    def path_of(self, name: str) -> str:
        added = self._changes.added.get(name)
        return self._static.get(name, "") if added is None else added.path

    def describe(self, name: str, path: str) -> AdapterRef:
        """Read an adapter's headers, in another process, and wait for it. Raises ConfigError."""
        num_weights = self._reader.num_weights(path, self._config.max_lora_rank)
        return AdapterRef(name, path, stamp_of(Path(path)), self._config.max_lora_rank, num_weights)

    def allowed(self, path: str) -> str:
        """The path of an adapter that may be loaded while the server runs, without links. Raises Forbidden."""
        folders = self._config.folders
        if not folders:
            raise Forbidden("adapters cannot be loaded while the server runs: start it with --lora-folders", "folder")
        if not 0 < len(path) <= MAX_PATH:  # before it is followed link by link
            raise InvalidRequest(f"lora_path must have 1 to {MAX_PATH} characters, got {len(path)}", param="lora_path")
        if "\0" in path:
            raise InvalidRequest("lora_path must not contain a null character", param="lora_path")
        try:
            real = os.path.realpath(path)
        except UnicodeEncodeError:
            raise InvalidRequest("lora_path has characters that no path can have", param="lora_path") from None
        for folder in folders:
            if os.path.commonpath([os.path.realpath(folder), real]) == os.path.realpath(folder):
                return real
        raise Forbidden(
            f"lora_path {quote(path)} is not in a folder from which adapters may be loaded (--lora-folders)", "folder"
        )

    def check_new(self, name: str, replaces: bool) -> None:
        """Raises InvalidRequest if no adapter of this name can be added."""
        self._check_name(name, "lora_name")
        if name in self.names() and not replaces:
            raise InvalidRequest(
                f"adapter {quote(name)} is loaded already: unload it first, or set load_inplace", param="lora_name"
            )
        if len(self.names()) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"{MAX_ADAPTERS} adapters are registered already, the most there can be", param="lora_name"
            )

    def add(self, ref: AdapterRef, replaces: bool) -> None:
        with self._changing() as changes:
            self.check_new(ref.name, replaces)
            changes.added[ref.name] = ref

    def remove(self, name: str) -> None:
        """Raises NotFound. Requests that run keep the adapter to their end."""
        with self._changing() as changes:
            if name not in self.names():
                raise NotFound(f"adapter {quote(name)} is not loaded", param="lora_name")
            changes.added.pop(name, None)
            if name in self._static and name not in changes.removed:
                changes.removed.append(name)

    def _check_name(self, name: str, field: str) -> None:
        if not name or len(name) > MAX_ADAPTER_NAME or not name.isprintable():
            raise InvalidRequest(f"{field} must be a name of 1 to {MAX_ADAPTER_NAME} printable characters", param=field)
        if name in self._taken:
            raise InvalidRequest(f"{field} {quote(name)} is the name of the model itself: choose another", param=field)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Changes]:
        """Change the file, one process at a time. An exception changes nothing."""
        if self._folder is None:
            changes = msgspec.convert(msgspec.to_builtins(self._changes), _Changes)
            yield changes
            self._changes = changes
            return
        with open(self._folder / _LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            changes = msgspec.convert(msgspec.to_builtins(self._changes), _Changes)
            yield changes
            written = self._folder / f"{_FILE}.{os.getpid()}"
            written.write_bytes(msgspec.json.encode(changes))
            os.replace(written, self._folder / _FILE)
            self._read()

    def _read(self) -> None:
        """Take in what another process has changed."""
        if self._folder is None:
            return
        path = self._folder / _FILE
        try:
            found = path.stat()
            if (found.st_ino, found.st_mtime_ns) == self._seen:
                return
            self._changes = msgspec.json.decode(path.read_bytes(), type=_Changes)
            self._seen = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            return
