"""Open a resolved model: its configuration and a stream of its tensors, in any supported format.

Opening a folder imports torch only if its weights are quantised. Opening a GGUF file imports the module of its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.config import read_json_object
from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.weights.formats.safetensors_files import all_wanted
from octavo.weights.sources import folder
from octavo.weights.sources.source import ModelSource, local

if TYPE_CHECKING:
    import torch

    from octavo.quants import QuantSizes, Weight


class TensorSource(Protocol):
    """The reader of one format."""

    stored_dtype: str
    packed_types: frozenset[str]
    """Types of the Quants that tensors(keep_packed=True) yields, as the headers say. A weight that turns out not to fit its
    type comes in another, or decoded."""
    packing_label: str  # the packed format in words, for people only; "": the weights are not packed
    num_bytes: int

    def held_bytes(self, itemsize: int, sizes: QuantSizes) -> int:
        """Bytes of tensors(keep_packed=True) in memory, where a quant takes what `sizes` says. Weights of types that are not
        in there, and those that are not packed, take `itemsize` bytes each."""
        ...

    def tensors(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        keep_packed: bool = False,
        is_wanted: Callable[[str], bool] = all_wanted,
    ) -> Iterator[tuple[str, Weight]]: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: dict[str, Any]  # in the form of a config.json, "model_type" included
    config_path: Path  # the file it was read from
    stored_dtype: str  # "float32", "float16" or "bfloat16": the arithmetic type nearest to what is stored
    num_bytes: int  # of the weights as stored; 0 if there are none
    weights: TensorSource | None  # None: only a configuration, for a model with random weights

    def tensors(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        keep_packed: bool = False,
        is_wanted: Callable[[str], bool] = all_wanted,
    ) -> Iterator[tuple[str, Weight]]:
        """Yield (Hugging Face name, tensor), one at a time. A tensor may be a view of its file: copy what you keep.
        `keep_packed`: yield matrices that are packed in the file as Quants, if the family supports it. `is_wanted`: by that name; other
        tensors are not read.
        On the device "meta" tensors have only names and shapes, and nothing is read. A NaN or infinity raises ConfigError."""
        from octavo.weights.nan_check import finite

        assert self.weights is not None, "opened with allow_missing_weights: fill the model with weights.dummy"
        return finite(self.weights.tensors(device, dtype, keep_packed, is_wanted))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to a ConfigError raised inside: families read a configuration without knowing its file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


_FIXED = ("model_type", "architectures", "quantization_config")
"""What decides how weights are read: no override changes it."""


def open_checkpoint(
    source: ModelSource | Path, *, allow_missing_weights: bool = False, hf_overrides: str = ""
) -> Checkpoint:
    """Read configuration and headers, but no tensor. Damaged or unreadable files raise ConfigError here. `hf_overrides`: JSON that
    replaces values of the configuration."""
    if isinstance(source, Path):
        source = local(source, allow_missing_weights=allow_missing_weights)
    if source.kind == "gguf":
        found = _open_gguf(source.path)
    else:
        found = _open_folder(source.path, allow_missing_weights)
    if not hf_overrides:
        return found
    return replace(found, config=_overridden(found.config, read_json_object(hf_overrides, "--hf-overrides")))


def _overridden(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Values are replaced; those of text_config, which is a configuration itself, one by one."""
    for name in _FIXED:
        if name in overrides:
            raise ConfigError(f"--hf-overrides cannot set {name}: the checkpoint's files decide it")
    inner = overrides.get("text_config")
    if isinstance(inner, dict) and isinstance(config.get("text_config"), dict):
        overrides = {**overrides, "text_config": {**config["text_config"], **inner}}
    return {**config, **overrides}


def _open_folder(path: Path, allow_missing_weights: bool) -> Checkpoint:
    from octavo.weights.formats.safetensors_files import SafetensorsFiles

    config, config_path = folder.read_config(path), path / folder.CONFIG
    if allow_missing_weights:
        return Checkpoint(config, config_path, _configured_dtype(config), 0, None)
    weights: TensorSource
    if (settings := folder.quantisation(path, config)) is not None:
        from octavo.weights.formats.quantised_folder import QuantisedFiles

        files = SafetensorsFiles(path, is_quantised=True)
        with naming(path):
            weights = QuantisedFiles(files, settings)
        return Checkpoint(
            config, config_path, _configured_dtype(config, weights.stored_dtype), weights.num_bytes, weights
        )
    weights = SafetensorsFiles(path)
    return Checkpoint(config, config_path, weights.stored_dtype, weights.num_bytes, weights)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{path} names no general.architecture: it is not a model")
    file.join_parts()
    if not file.tensors:
        raise ConfigError(f"{path} holds a vocabulary and no weights: pass the whole model")

    from octavo.models import load_gguf_family

    with naming(path):
        family = load_gguf_family(architecture)
        if not hasattr(family, "gguf_config"):
            raise ConfigError(f"{architecture} models cannot be read from GGUF files: pass a folder with safetensors")
        config = family.gguf_config(file.metadata, file.tensors)

    from octavo.weights.formats.gguf_tensors import GGUFTensors

    weights = GGUFTensors(file, family, config)
    return Checkpoint(config, path, weights.stored_dtype, weights.num_bytes, weights)


def _configured_dtype(config: dict[str, Any], otherwise: str = "float32") -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in ("float32", "float16", "bfloat16") else otherwise
