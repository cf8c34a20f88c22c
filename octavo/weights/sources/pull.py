"""Pulls a model from the hub into the store: chooses its files, downloads what is missing, checks it, writes the manifest."""

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.gguf import part_paths
from octavo.weights.sources.download import PART, Download
from octavo.weights.sources.hub_api import Hub, HubFile, Repository
from octavo.weights.sources.names import LATEST, ModelName, is_tag
from octavo.weights.sources.store import Manifest, ManifestFile, Store, StoredModel

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_M", "BF16", "F16", "F32")
"""Of a GGUF repository, where the name has no tag."""
SPARE_BYTES = 256 * 2**20  # of the disk: for everything else
REPORT_SECONDS = 0.1  # between two reports of a file's progress
_SMALL_FILES = re.compile(r"[^/]+\.(json|model|jinja|tiktoken)|merges\.txt|vocab\.txt")
_WEIGHTS = re.compile(r"(?!consolidated|adapter_model)[^/]+\.safetensors")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that are no language models
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?=[-._/]|$)", re.IGNORECASE)
_SAFE_NAME = re.compile(r"[\w+@=,()-][\w.+@=,() -]{0,200}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PullReport:
    """What is being done; `total` 0: it has no size."""

    status: str
    digest: str = ""  # of the file that is fetched
    completed: int = 0
    total: int = 0


OnReport = Callable[[PullReport], None]
"""It may raise to stop the pull. What was fetched is kept, and the next pull continues."""


@dataclass(frozen=True, slots=True)
class Choice:
    name: ModelName  # with the tag under which the files are kept
    kind: str  # gguf or folder
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def pull(
    name: ModelName,
    on_report: OnReport,
    *,
    revision: str = "",
    hub: Hub | None = None,
    store: Store | None = None,
    max_store_bytes: int | None = None,
    retry_seconds: float = 1.0,
) -> StoredModel:
    """Raises ConfigError. `max_store_bytes`: of all models; None: as many as the disk holds."""
    hub, store = hub or Hub(), store or Store()
    on_report(PullReport("pulling manifest"))
    repository = hub.list_files(name.hub_id, revision)
    choice = choose(name, repository)
    folder = store.folder_of(choice.name)
    try:
        with store.changing(folder):
            _check_room(choice, folder, store, max_store_bytes)
            kept = _kept(store, choice)
            files = [_pull_file(hub, repository, file, folder, kept, on_report, retry_seconds) for file in choice.files]
            on_report(PullReport("writing manifest"))
            manifest = Manifest(str(choice.name), choice.kind, repository.commit, files, time.time())
            stored = store.write(folder, manifest)
    except BlockingIOError:
        raise ConfigError(f"{choice.name} is being pulled by another process: wait until that has ended") from None
    except OSError as error:
        raise ConfigError(
            f"cannot keep {choice.name} in {folder} ({error.strerror or error}): free some space there, or set OCTAVO_CACHE to "
            "a folder that can be written"
        ) from None
    on_report(PullReport("success"))
    return stored


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────


def choose(name: ModelName, repository: Repository) -> Choice:
    """The files of a model: the .gguf file (or its parts) that the tag names, else the safetensors, else the best .gguf file."""
    weights = [file for file in repository.files if _WEIGHTS.fullmatch(file.name)]
    models = _gguf_models(repository)
    if weights and not name.tag:
        small = [file for file in repository.files if _SMALL_FILES.fullmatch(file.name)]
        return Choice(ModelName(name.hub_id), "folder", tuple(_safe(file) for file in (*small, *weights)))
    if not models:
        if name.tag and weights:
            raise ConfigError(f"{name.hub_id} has no .gguf files, which a tag would choose from: leave :{name.tag} out")
        raise ConfigError(
            f"{name.hub_id} has neither .gguf files nor safetensors, and pickled weights (.bin, .pt) are never opened: pull another "
            "repository of the model"
        )
    label = _find(name, models)
    for file in models[label]:
        _safe(file)
    return Choice(ModelName(name.hub_id, _tag_of(label, models)), "gguf", models[label])


def _gguf_models(repository: Repository) -> dict[str, tuple[HubFile, ...]]:
    """Name of the (first) file → all files of the model, which may be split into several."""
    files = {file.name: file for file in repository.files if file.name.lower().endswith(".gguf")}
    models = {}
    for name in sorted(files):
        parts = [str(path) for path in part_paths(Path(name))]
        if parts[0] == name and not _NO_MODEL.search(name):
            missing = [part for part in parts if part not in files]
            if missing:
                raise ConfigError(f"{repository.hub_id} lacks {missing[0]}, a part of its model {name}")
            models[name] = tuple(files[part] for part in parts)
    return models


def _find(name: ModelName, models: dict[str, tuple[HubFile, ...]]) -> str:
    """The model that the tag names; without a tag the preferred one."""
    if not name.tag and len(models) == 1:
        return next(iter(models))
    for tag in [name.tag] if name.tag else PREFERRED:
        as_word = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?=[-._/]|$)", re.IGNORECASE)
        named = [label for label in models if Path(label).name.lower() in (tag.lower(), f"{tag.lower()}.gguf")]
        named = named or [label for label in models if as_word.search(label)]
        if named:
            return min(named, key=lambda label: (len(label), label))
    if not name.tag:
        return min(models, key=lambda label: sum(file.num_bytes for file in models[label]))
    known = sorted({_tag_of(label, models) for label in models})
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    raise ConfigError(f"{name.hub_id} has no file {name.tag}; it has {', '.join(known[:20])}{more}")


def _tag_of(label: str, models: dict[str, tuple[HubFile, ...]]) -> str:
    """A model's tag: its quantisation, or its file's name where several have the same."""

    def quant(name: str) -> str:
        found = _QUANT.findall(name)
        return found[-1].upper() if found else ""

    own = quant(label)
    if own and sum(quant(other) == own for other in models) == 1:
        return own
    stem = Path(part_paths(Path(label))[0].name).stem
    tag = re.sub(r"[^\w.-]", "_", stem, flags=re.ASCII).lstrip(".-")[:128]
    return tag if is_tag(tag) else LATEST


def _safe(file: HubFile) -> HubFile:
    """Raise ConfigError for a name that could lie outside the model's folder, or that is ours."""
    name = file.name.rpartition("/")[2]
    if not _SAFE_NAME.fullmatch(name) or name.endswith(PART) or name in ("lock", "manifest.json"):
        raise ConfigError(f"the hub lists a file with the name {file.name[:100]!r}, which cannot be kept here")
    return file


# ── fetching ────────────────────────────────────────────────────────────────────────────────────────


def _check_room(choice: Choice, folder: Path, store: Store, max_store_bytes: int | None) -> None:
    """Raise ConfigError before the first byte if the model would not fit."""
    here = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if max_store_bytes is not None and store.num_bytes - here + choice.num_bytes > max_store_bytes:
        raise ConfigError(
            f"{choice.name} has {choice.num_bytes} bytes; with the models that are here that is more than {max_store_bytes} bytes "
            "(--max-model-store-bytes): delete a model first"
        )
    free = shutil.disk_usage(folder).free
    if choice.num_bytes - here > free - SPARE_BYTES:
        raise ConfigError(
            f"{choice.name} has {choice.num_bytes} bytes, and {free} are free on the disk of {folder}: free some space, or set "
            "OCTAVO_CACHE to a folder on another disk"
        )


def _kept(store: Store, choice: Choice) -> dict[str, str]:
    """SHA-256 of the files that an earlier pull of the model has completed and checked, by name."""
    before = store.find(choice.name)
    if before is None or before.folder != store.folder_of(choice.name):
        return {}
    return {file.name: file.sha256 for file in before.manifest.files}


def _pull_file(
    hub: Hub,
    repository: Repository,
    file: HubFile,
    folder: Path,
    kept: dict[str, str],
    on_report: OnReport,
    retry_seconds: float,
) -> ManifestFile:
    name = file.name.rpartition("/")[2]
    target = folder / name
    status = f"pulling {name}"
    last_report, is_complete = 0.0, False

    def report(num_bytes: int) -> None:
        nonlocal last_report, is_complete
        now = time.monotonic()
        is_last = num_bytes >= file.num_bytes
        if not is_complete and (is_last or now - last_report >= REPORT_SECONDS):
            last_report, is_complete = now, is_last
            on_report(PullReport(status, file.sha256, min(num_bytes, file.num_bytes), file.num_bytes))

    if file.sha256 and _is_whole(target, file, kept):
        report(file.num_bytes)
        return ManifestFile(name, file.num_bytes, file.sha256)
    sha256 = Download(hub, repository, file, target, report, retry_seconds).run()
    report(file.num_bytes)
    return ManifestFile(name, file.num_bytes, sha256)


def _is_whole(target: Path, file: HubFile, kept: dict[str, str]) -> bool:
    """Whether the file is here: in the manifest, or completed by a pull that was interrupted later."""
    try:
        size = target.stat().st_size
    except OSError:
        return False
    if size != file.num_bytes:
        return False
    if kept.get(target.name) == file.sha256:
        return True
    with open(target, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
