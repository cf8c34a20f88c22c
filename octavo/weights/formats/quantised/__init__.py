"""Quantised safetensors: one file per method, named as config.json's quant_method: the folder is the registry.
Knows nothing of any method but its file name, nor of how a weight is multiplied.

A method's file has plan(settings, entries, small) -> Plan: from quantization_config and the headers of all tensors, which
of them belong together, and how they make the weight that an unquantised checkpoint would hold in their place. small(name)
gives the bytes of a tensor that holds no numbers of the weight."""

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

Parts = dict[str, "torch.Tensor"]  # what a method calls them → as stored


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one weight is made."""

    name: str  # in an unquantised checkpoint
    parts: Mapping[str, str]  # what the method calls a part → its name in the files
    shape: tuple[int, ...]
    make: Callable[[Parts, bool], Weight]  # of the parts, and whether Quants are wanted
    held_as: str = ""  # the type of Quants it will probably be; "": it is decoded


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors that are named nowhere here come as they are."""

    about: str  # for people: "gptq (4 bits)"
    recipes: list[Recipe]
    unused: set[str] = field(default_factory=set)  # what nothing here needs: scales of activations, for instance


def methods() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


Small = Callable[[str], bytes]


def plan(settings: Any, entries: Mapping[str, Entry], small: Small) -> Plan:
    """`settings`: config.json's quantization_config."""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    name = method.replace("-", "_") if isinstance(method, str) else ""
    if name not in methods():
        shown = f"by {method!r}" if isinstance(method, str) else "in a way that quantization_config does not name"
        raise ConfigError(
            f"the checkpoint is quantised {shown[:60]}, which cannot be read; {', '.join(methods())} can, or pass the model's "
            "unquantised checkpoint, or a GGUF file"
        )
    found: Plan = importlib.import_module(f"{__name__}.{name}").plan(settings, entries, small)
    return found


# ── what methods' files share ───────────────────────────────────────────────────────────────────────


def siblings(entries: Mapping[str, Entry], module: str, suffixes: Mapping[str, str]) -> dict[str, str]:
    """What a method calls them → names, of those of a module's tensors that are there."""
    return {part: name for part, suffix in suffixes.items() if (name := f"{module}{suffix}") in entries}


def require(entries: Mapping[str, Entry], module: str, parts: Mapping[str, str], *wanted: str) -> None:
    missing = [part for part in wanted if part not in parts]
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]} of {module}: it is incomplete, fetch it again")


def misfit(entries: Mapping[str, Entry], module: str, parts: Mapping[str, str]) -> ConfigError:
    """Shapes or types that do not belong together."""
    shown = ", ".join(f"{part} {entries[name].type} {list(entries[name].shape)}" for part, name in parts.items())
    return ConfigError(f"the parts of {module} do not fit each other ({shown}): fetch the checkpoint again")


def whole_number(settings: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The first of the keys that is there."""
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"quantization_config's {key} is {str(value)[:40]!r}: it must be a whole number")
            return value
    return default
