"""Resolve --model (nothing, a folder, a .gguf file, a hub id) to files on this machine. Does not import torch: every
process may import this."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError
from octavo.gguf import part_paths
from octavo.models import check_family
from octavo.weights.sources import default_model, folder, hub
from octavo.weights.sources.default_model import cache_folder as cache_folder
from octavo.weights.sources.names import ModelName, read_name
from octavo.weights.sources.progress import ProgressLine
from octavo.weights.sources.pull import pull
from octavo.weights.sources.store import Store, StoredModel


@dataclass(frozen=True, slots=True)
class ModelSource:
    path: Path  # a folder in Hugging Face layout, or one .gguf file
    name: str  # the model name in the API
    kind: Literal["folder", "gguf"]
    default_sampling: Mapping[str, float] = field(
        default_factory=dict
    )  # the makers' advice, if none of its files holds it
    note: str = ""  # what its users should know, for the start


def resolve(
    name: str,
    revision: str = "",
    *,
    allow_missing_weights: bool = False,
    download_dir: str = "",
    is_draft_head: bool = False,
) -> ModelSource:
    """Find or fetch a model; "" is the default model. `allow_missing_weights`: random weights will be used. `download_dir`: folder for
    models from the hub; empty: the hub's own. `is_draft_head`: of no family of models."""
    if download_dir:
        _download_to(download_dir)
    path = _existing(name) if name else None
    hub_name = read_name(name) if name and path is None else None
    if revision and hub_name is None:
        raise ConfigError(
            f"--revision {revision} is only for hub ids, and {name or 'the embedded model'!r} is not one: drop it"
        )
    if not name:
        embedded = default_model.SMOLLM2
        return ModelSource(default_model.fetch(), embedded.name, "gguf", embedded.default_sampling, embedded.note)
    if path is not None:
        return local(path, allow_missing_weights=allow_missing_weights, is_draft_head=is_draft_head)
    if hub_name is None:
        raise ConfigError(
            f"no such file or folder: {name[:300]}; pass a model folder, a .gguf file or a hub id (owner/name, or "
            "owner/name-GGUF:Q4_K_M)"
        )
    if not revision and (stored := Store().find(hub_name)) is not None:
        return _stored(stored, allow_missing_weights)
    if hub_name.tag or name != hub_name.hub_id:
        return _stored(_pull(hub_name, revision), allow_missing_weights)
    try:
        fetched = hub.fetch(name, revision, weights=not allow_missing_weights)
    except hub.NoSafetensors as error:
        try:
            return _stored(_pull(hub_name, revision), allow_missing_weights)
        except ConfigError as also:
            raise ConfigError(f"{error.message} ({also.message})") from error
    try:
        _check_folder(fetched, allow_missing_weights, is_draft_head)
    except ConfigError as error:  # the folder is one the caller never named
        raise ConfigError(f"hub model {name}: {error.message}") from error
    return ModelSource(fetched, name, "folder")


def _download_to(folder: str) -> None:
    """Set the hub's cache for this process and those that it starts."""
    from huggingface_hub import constants

    path = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--download-dir {folder} cannot be used ({error.strerror}): name another folder") from None
    os.environ["HF_HUB_CACHE"] = path
    constants.HF_HUB_CACHE = path  # read from the environment when the library was imported


def local(path: Path, *, allow_missing_weights: bool = False, is_draft_head: bool = False) -> ModelSource:
    """Resolve an existing folder or .gguf file."""
    path = Path(os.path.abspath(path))  # not resolved: a link keeps its own name
    if path.is_dir():
        _check_folder(path, allow_missing_weights, is_draft_head)
        return ModelSource(path, path.name, "folder")
    if path.suffix.lower() == ".gguf" or _starts_as_gguf(path):
        return _gguf(path)
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path} is only the weights: pass the folder, with config.json and the tokenizer in it")
    raise ConfigError(f"{path} is no .gguf file: pass a model folder, a .gguf file or a hub id (owner/name)")


def _pull(name: ModelName, revision: str) -> StoredModel:
    progress = ProgressLine()
    try:
        return pull(name, progress, revision=revision)
    finally:
        progress.close()


def _stored(model: StoredModel, allow_missing_weights: bool) -> ModelSource:
    if model.manifest.kind == "gguf":
        return ModelSource(model.path, model.name, "gguf")
    _check_folder(model.folder, allow_missing_weights)
    return ModelSource(model.folder, model.name, "folder")


def _gguf(path: Path) -> ModelSource:
    """A .gguf file, or all files of a model that is split into several."""
    paths = part_paths(path)
    if len(paths) == 1:
        return ModelSource(path, path.stem, "gguf")
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{path} is one of {len(paths)} parts, and {', '.join(missing[:3])}{more} are missing in its folder: fetch them"
        )
    return ModelSource(paths[0], paths[0].stem.rsplit("-", 3)[0], "gguf")


def _existing(name: str) -> Path | None:
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    try:
        return path if path.exists() else None
    except OSError as error:  # a parent folder is not accessible, or the name is too long
        raise ConfigError(f"cannot look for {name}: {error.strerror}") from error


def _check_folder(path: Path, allow_missing_weights: bool, is_draft_head: bool = False) -> None:
    try:
        config = folder.read_config(path)
        if not is_draft_head:
            check_family(config["model_type"], architectures=config.get("architectures"))
        if not allow_missing_weights:
            folder.find_weights(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _starts_as_gguf(path: Path) -> bool:
    """Check the magic bytes: files in the hub's cache are named by a hash, without .gguf."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
