"""Resolve --model (nothing, a folder, a .gguf file, a hub id) to files on this machine. Does not import torch: every
process may import this."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError
from octavo.models import check_family
from octavo.weights.sources import default_model, folder, hub
from octavo.weights.sources.default_model import cache_folder as cache_folder


@dataclass(frozen=True, slots=True)
class ModelSource:
    path: Path  # a folder in Hugging Face layout, or one .gguf file
    name: str  # the model name in the API
    kind: Literal["folder", "gguf"]
    default_sampling: Mapping[str, float] = field(
        default_factory=dict
    )  # the makers' advice, if none of its files holds it


def resolve(
    name: str, revision: str = "", *, allow_missing_weights: bool = False, download_dir: str = ""
) -> ModelSource:
    """Find or fetch a model; "" is the default model. `allow_missing_weights`: random weights will be used. `download_dir`: folder for
    models from the hub; empty: the hub's own."""
    if download_dir:
        _download_to(download_dir)
    path = _existing(name) if name else None
    is_hub_id = bool(name) and path is None and hub.looks_like_hub_id(name)
    if revision and not is_hub_id:
        raise ConfigError(
            f"--revision {revision} is only for hub ids, and {name or 'the embedded model'!r} is not one: drop it"
        )
    if not name:
        return ModelSource(
            default_model.fetch(), default_model.SMOLLM2.name, "gguf", default_model.SMOLLM2.default_sampling
        )
    if path is not None:
        return local(path, allow_missing_weights=allow_missing_weights)
    if not is_hub_id:
        raise ConfigError(f"{name} does not exist: pass a model folder, a .gguf file or a hub id (owner/name)")
    fetched = hub.fetch(name, revision, weights=not allow_missing_weights)
    try:
        _check_folder(fetched, allow_missing_weights)
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


def local(path: Path, *, allow_missing_weights: bool = False) -> ModelSource:
    """Resolve an existing folder or .gguf file."""
    path = Path(os.path.abspath(path))  # not resolved: a link keeps its own name
    if path.is_dir():
        _check_folder(path, allow_missing_weights)
        return ModelSource(path, path.name, "folder")
    if path.suffix.lower() == ".gguf" or _starts_as_gguf(path):
        return ModelSource(path, path.stem, "gguf")
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path} is only the weights: pass the folder, with config.json and the tokenizer in it")
    raise ConfigError(f"{path} is no .gguf file: pass a model folder, a .gguf file or a hub id (owner/name)")


def _existing(name: str) -> Path | None:
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    try:
        return path if path.exists() else None
    except OSError as error:  # a parent folder is not accessible, or the name is too long
        raise ConfigError(f"cannot look for {name}: {error.strerror}") from error


def _check_folder(path: Path, allow_missing_weights: bool) -> None:
    try:
        config = folder.read_config(path)
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
