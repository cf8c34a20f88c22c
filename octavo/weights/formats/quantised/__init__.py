"""Quantised safetensors. The folder is the registry: one module per method, named after quant_method in config.json.

A method's module has plan_load(settings, entries, small) -> LoadPlan. From quantization_config and the headers of all tensors it
determines which tensors belong together, and how they make the weight that an unquantised checkpoint would hold.
small(name) returns the bytes of a small tensor of metadata."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.quants import Weight
    from octavo.weights.formats.safetensors_files import Entry

Parts = dict[str, "torch.Tensor"]  # the method's name of a part → the stored tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one weight."""

    name: str  # in an unquantised checkpoint
    parts: Mapping[str, str]  # the method's name of a part → the tensor's name in the files
    shape: tuple[int, ...]
    make: Callable[[Parts, bool], Weight]  # (parts, keep_packed)
    held_as: str = ""  # the type of Quants that make() probably returns with keep_packed; "": it is decoded


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a method turns a checkpoint's tensors into weights. Tensors it does not name are weights as they are."""

    about: str  # for log lines: "gptq, 4 bits"
    recipes: list[Recipe]
    unused: set[str] = field(default_factory=set)  # tensors to skip: scales of activations, for instance


def methods() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


Small = Callable[[str], bytes]


def plan_load(settings: Any, entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    """Plan by the method that `settings`, config.json's quantization_config, names."""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    name = method.replace("-", "_") if isinstance(method, str) else ""
    if name not in methods():
        shown = f"by {method!r}" if isinstance(method, str) else "in a way that quantization_config does not name"
        raise ConfigError(
            f"the checkpoint is quantised {shown[:60]}, which cannot be read; {', '.join(methods())} can, or pass the model's "
            "unquantised checkpoint, or a GGUF file"
        )
    found: LoadPlan = importlib.import_module(f"{__name__}.{name}").plan_load(settings, entries, small)
    return found


# ── shared by the methods ───────────────────────────────────────────────────────────────────────────


def siblings(entries: Mapping[str, Entry], module: str, suffixes: Mapping[str, str]) -> dict[str, str]:
    """The module's tensors that exist: the method's name of a part → the tensor's name."""
    return {part: name for part, suffix in suffixes.items() if (name := f"{module}{suffix}") in entries}


def require(entries: Mapping[str, Entry], module: str, parts: Mapping[str, str], *wanted: str) -> None:
    missing = [part for part in wanted if part not in parts]
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]} of {module}: it is incomplete, fetch it again")


def misfit(entries: Mapping[str, Entry], module: str, parts: Mapping[str, str]) -> ConfigError:
    """The error for parts whose shapes or types do not fit together."""
    shown = ", ".join(f"{part} {entries[name].type} {list(entries[name].shape)}" for part, name in parts.items())
    return ConfigError(f"the parts of {module} do not fit each other ({shown}): fetch the checkpoint again")


def int_setting(settings: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The value of the first key that is present."""
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"quantization_config's {key} is {str(value)[:40]!r}: it must be a whole number")
            return value
    return default
