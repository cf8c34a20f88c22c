"""8-bit float checkpoints: a weight and its weight_scale or weight_scale_inv, per tensor, row or block.
Scales of activations are skipped: activations are not rounded here."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from octavo.errors import ConfigError
from octavo.quants import Weight
from octavo.weights.formats import fp8_blocks
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, misfit, require, siblings
from octavo.weights.formats.safetensors_files import Entry

# The weight is multiplied by either scale: weight_scale_inv is no reciprocal, despite its name.
_SCALES = {"weight": ".weight", "scale": ".weight_scale", "scale_inv": ".weight_scale_inv"}
_UNUSED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".input_scale_ub")


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    block = block_size(settings.get("weight_block_size"))
    modules = [name.removesuffix(".weight") for name, entry in entries.items() if is_float8(name, entry)]
    recipes = [_recipe(entries, module, block) for module in modules]
    return LoadPlan("fp8", recipes, {name for name in entries if name.endswith(_UNUSED)})


def is_float8(name: str, entry: Entry) -> bool:
    if entry.type not in fp8_blocks.TYPES:
        return False
    if not name.endswith(".weight"):
        raise ConfigError(
            f"the checkpoint's {name} is in {entry.type}: only tensors named weight are read in 8-bit floats"
        )
    return True


def block_size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(extent) is int and extent > 0 for extent in value):
        return value[0], value[1]
    raise ConfigError(f"quantization_config's block size is {str(value)[:40]!r}: it must be two whole numbers above 0")


def _recipe(entries: Mapping[str, Entry], module: str, block: tuple[int, int] | None) -> Recipe:
    parts = siblings(entries, module, _SCALES)
    if "scale" not in parts:
        parts = {part.removesuffix("_inv"): name for part, name in parts.items()}
    return scaled_recipe(entries, module, parts, block)


def scaled_recipe(
    entries: Mapping[str, Entry], module: str, parts: dict[str, str], block: tuple[int, int] | None
) -> Recipe:
    """The recipe for `parts` with a weight and a scale."""
    require(entries, module, parts, "weight", "scale")
    weight, scale = entries[parts["weight"]], entries[parts["scale"]]
    found = fp8_blocks.block_of(weight.shape, scale.shape, block)
    if found is None or not scale.arithmetic:
        raise misfit(entries, module, parts)
    held = fp8_blocks.held_as(weight.shape, weight.type, found)
    return Recipe(f"{module}.weight", parts, weight.shape, partial(_make, block=found), held)


def _make(parts: Parts, keep_packed: bool, block: tuple[int, int]) -> Weight:
    return fp8_blocks.weight_of(parts["weight"], parts["scale"], block, keep_packed)
