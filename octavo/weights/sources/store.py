"""The models that were pulled: a folder each in models/ of the cache folder, with a manifest that lists its files.

models/OWNER/NAME/TAG/manifest.json; the folder without its manifest is a download that was interrupted."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo.errors import ConfigError
from octavo.weights.sources.default_model import cache_folder
from octavo.weights.sources.names import LATEST, ModelName, is_tag

MANIFEST = "manifest.json"
LOCK = "lock"
NO_OWNER = "_"  # folder of repositories without an owner


class ManifestFile(msgspec.Struct, frozen=True):
    name: str  # in the model's folder
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    name: str  # the model's, with its tag
    kind: str  # gguf or folder
    commit: str
    files: list[ManifestFile]  # of a GGUF model its parts in order
    pulled: float  # time.time()


@dataclass(frozen=True, slots=True)
class StoredModel:
    manifest: Manifest
    folder: Path

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def path(self) -> Path:
        """What is served: the (first) .gguf file, or the folder."""
        return self.folder / self.manifest.files[0].name if self.manifest.kind == "gguf" else self.folder

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)

    @property
    def digest(self) -> str:
        """A checksum of all checksums."""
        lines = "".join(f"{file.sha256} {file.name}\n" for file in self.manifest.files)
        return hashlib.sha256(lines.encode()).hexdigest()


class Store:
    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_folder() / "models"

    def models(self) -> list[StoredModel]:
        """By name."""
        found = [self._read(path.parent) for path in self.root.glob(f"*/*/*/{MANIFEST}")]
        return sorted((model for model in found if model is not None), key=lambda model: model.name.lower())

    def find(self, name: ModelName) -> StoredModel | None:
        """The model with this name. The tag is in any case, or a file's name; without one it is the model's only tag, or its
        latest."""
        everything = [self._read(folder) for folder in sorted(self.folder_of(name).parent.glob("*"))]
        found = [model for model in everything if model is not None]
        if name.tag:
            tag = name.tag.lower()
            named = [model for model in found if model.folder.name.lower() == tag]
            return next(iter(named or [model for model in found if model.path.name.lower() == tag]), None)
        latest = next((model for model in found if model.folder.name == LATEST), None)
        return latest or (found[0] if len(found) == 1 else None)

    def folder_of(self, name: ModelName) -> Path:
        owner, _, own = name.hub_id.rpartition("/")
        tag = name.tag or LATEST
        assert is_tag(tag)
        return self.root / (owner or NO_OWNER) / own / tag

    @property
    def num_bytes(self) -> int:
        """Of all files of all models, those of interrupted downloads included."""
        return sum(_size(path) for path in self.root.rglob("*"))

    @contextlib.contextmanager
    def changing(self, folder: Path) -> Iterator[None]:
        """Hold the lock of one model. Raises BlockingIOError if another process holds it."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def write(self, folder: Path, manifest: Manifest) -> StoredModel:
        """Add or replace a model whose files are in the folder; other files there are removed."""
        fresh = folder / f"{MANIFEST}.new"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        os.replace(fresh, folder / MANIFEST)
        kept = {MANIFEST, LOCK, *(file.name for file in manifest.files)}
        for path in folder.iterdir():
            if path.name not in kept and path.is_file():
                path.unlink()
        return StoredModel(manifest, folder)

    def remove(self, model: StoredModel) -> None:
        """Delete a model's files. Raises ConfigError while it is being pulled."""
        try:
            with self.changing(model.folder):
                (model.folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(model.folder)
        except BlockingIOError:
            raise ConfigError(
                f"{model.name} is being pulled by another process: try again when that has ended"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot remove {model.folder}: {error.strerror}") from None
        for empty in (model.folder.parent, model.folder.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()

    def _read(self, folder: Path) -> StoredModel | None:
        """None: there is no complete model in the folder."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, ValueError, RecursionError):  # of msgspec, and where a text is not UTF-8
            return None
        names = [file.name for file in manifest.files]
        if not names or any(Path(name).name != name or not _is_file(folder / name) for name in names):
            return None
        return StoredModel(manifest, folder)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # removed meanwhile
        return 0
