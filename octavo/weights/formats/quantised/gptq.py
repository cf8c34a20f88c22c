"""GPTQ: 2, 4 or 8 bits, groups with a scale and a zero point; the inputs of a group need not be adjacent (act-order).
Kernel-specific layouts are refused.

qweight [K · bits / 32, N] int32 holds neighbouring inputs in a word, qzeros [G, N · bits / 32] neighbouring outputs;
scales [G, N]; g_idx [K] is the group of each input. The weight is scale · (code − zero), transposed to [N, K]. The first
version of the format stores zero − 1."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from octavo.errors import ConfigError
from octavo.quants import Weight
from octavo.weights.formats.integer_groups import held_as, unpacked, weight_of
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, int_setting, misfit, require, siblings
from octavo.weights.formats.safetensors_files import Entry

_PARTS = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales", "g_idx": ".g_idx"}
_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    bits, format = int_setting(settings, "bits", default=4), settings.get("checkpoint_format") or "gptq"
    if bits not in _BITS or format not in _FORMATS:
        raise ConfigError(
            f"GPTQ with {bits} bits in the format {str(format)[:40]!r} cannot be read; "
            f"2, 4 and 8 bits in {' and '.join(_FORMATS)} can"
        )
    modules = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
    recipes = [_recipe(entries, module, settings, format == "gptq") for module in modules]
    return LoadPlan(f"gptq, {bits} bits", recipes)


def _recipe(entries: Mapping[str, Entry], module: str, settings: Mapping[str, Any], is_less_one: bool) -> Recipe:
    parts = siblings(entries, module, _PARTS)
    require(entries, module, parts, "qweight", "qzeros", "scales")
    weight, zeros, scales = (entries[parts[part]] for part in ("qweight", "qzeros", "scales"))
    shapes = (weight.shape, zeros.shape, scales.shape)
    if (weight.type, zeros.type) != ("I32", "I32") or not scales.arithmetic or any(len(shape) != 2 for shape in shapes):
        raise misfit(entries, module, parts)
    groups, num_columns = scales.shape
    # Modules may differ in bits: derive them from the stored shapes.
    bits = zeros.shape[1] * 32 // num_columns if num_columns else 0
    if bits not in _BITS or groups == 0:
        raise misfit(entries, module, parts)
    width = weight.shape[0] * 32 // bits
    index = entries[parts["g_idx"]] if "g_idx" in parts else None
    fits = weight.shape[1] == num_columns and zeros.shape == (groups, num_columns * bits // 32)
    fits = fits and (width % groups == 0 or index is not None)
    if not fits or (index is not None and (index.shape != (width,) or index.type not in ("I32", "I64"))):
        raise misfit(entries, module, parts)
    has_order = bool(settings.get("desc_act")) and index is not None and groups > 1
    held = held_as(bits, bool(settings.get("sym", True)), width // groups, has_order) if width % groups == 0 else ""
    make = partial(_make, module=module, bits=bits, is_less_one=is_less_one)
    return Recipe(f"{module}.weight", parts, (num_columns, width), make, held)


def _make(parts: Parts, keep_packed: bool, module: str, bits: int, is_less_one: bool) -> Weight:
    codes = unpacked(parts["qweight"].t(), bits)  # [N, K]
    zeros = unpacked(parts["qzeros"], bits)  # [G, N]
    if is_less_one:
        zeros = zeros + 1 & (1 << bits) - 1
    group_of = parts.get("g_idx")
    num_groups = len(zeros)
    if group_of is not None and not (int(group_of.min()) >= 0 and int(group_of.max()) < num_groups):
        raise ConfigError(f"g_idx of {module} names a group beyond its {num_groups}: fetch the checkpoint again")
    return weight_of(codes, zeros.t(), parts["scales"].t(), group_of, keep_packed)
