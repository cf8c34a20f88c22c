"""The compressed-tensors format: 8-bit floats, 8-bit integers, and 2, 4 or 8-bit integers packed into words.
Scales of activations are skipped: activations are not rounded here.

weight_packed [N, K · bits / 32] int32, or weight [N, K] int8 or float8; weight_scale per tensor, row, group [N, G] or
block; weight_zero_point [N · bits / 32, G] int32, packed along N, or int8 in the shape of the scales. Packed numbers are
stored unsigned: 2^(bits − 1) stands for 0."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError
from octavo.quants import Weight
from octavo.weights.formats import fp8_blocks
from octavo.weights.formats.integer_groups import held_as, unpacked, weight_of
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, int_setting, misfit, require, siblings
from octavo.weights.formats.quantised.fp8 import block_size, scaled_recipe
from octavo.weights.formats.safetensors_files import Entry

_PARTS = {
    "packed": ".weight_packed", "weight": ".weight", "scale": ".weight_scale", "zero": ".weight_zero_point",
    "g_idx": ".weight_g_idx", "shape": ".weight_shape",
}  # fmt: skip
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".input_zero_point")
_BITS = (2, 4, 8)


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    groups = list(_groups(settings))
    formats = {str(settings.get("format") or "")} - {"mixed-precision", ""}
    formats |= {str(group["format"]) for group in groups if group.get("format")}
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        formats.add(str(sparsity["format"]))
    if unknown := sorted(formats - set(_FORMATS)):
        raise ConfigError(
            f"the compressed-tensors format {unknown[0][:40]!r} cannot be read; {', '.join(_FORMATS)} can"
        )
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    packed_bits = {int_setting(weight, "num_bits", default=8) for weight in weights if weight.get("type") != "float"}
    blocks = {block_size(weight.get("block_structure")) for weight in weights} - {None}
    block = next(iter(blocks)) if len(blocks) == 1 else None
    recipes = []
    for name, entry in entries.items():
        if name.endswith(".weight_packed"):
            recipes.append(_packed_recipe(entries, name.removesuffix(".weight_packed"), packed_bits, small))
        elif entry.type in fp8_blocks.TYPES and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            recipes.append(scaled_recipe(entries, module, _parts(entries, module, "weight", "scale"), block))
        elif entry.type == "I8" and name.endswith(".weight"):
            recipes.append(_int8_recipe(entries, name.removesuffix(".weight")))
    about = f"compressed-tensors, {', '.join(sorted(formats))}".rstrip(", ")
    return LoadPlan(about, recipes, {name for name in entries if name.endswith(_UNUSED)})


def _groups(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError("quantization_config's config_groups is not a table of groups: fetch config.json again")
    yield from groups.values()


def _parts(entries: Mapping[str, Entry], module: str, *wanted: str) -> dict[str, str]:
    return siblings(entries, module, {part: _PARTS[part] for part in wanted})


def _packed_recipe(entries: Mapping[str, Entry], module: str, packed_bits: set[int], small: Small) -> Recipe:
    parts = _parts(entries, module, "packed", "scale", "zero", "g_idx", "shape")
    require(entries, module, parts, "packed", "scale")
    packed, scale = entries[parts["packed"]], entries[parts["scale"]]
    if len(packed_bits) != 1 or not packed_bits <= set(_BITS):
        shown = " and ".join(map(str, sorted(packed_bits))) or "unknown"
        raise ConfigError(
            f"compressed-tensors with integers of {shown} bits cannot be read; 2, 4 or 8 bits for all can"
        )
    (bits,) = packed_bits
    if packed.type != "I32" or not scale.arithmetic or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise misfit(entries, module, parts)
    num_rows, groups = scale.shape
    width = _width(entries, parts, small, packed.shape[1] * 32 // bits)
    fits = width > 0 and packed.shape == (num_rows, -(-width * bits // 32)) and groups > 0 and width % groups == 0
    if "zero" in parts:
        zero = entries[parts["zero"]]
        fits = fits and zero.shape == (-(-num_rows * bits // 32) if zero.type == "I32" else num_rows, groups)
        fits = fits and zero.type in ("I32", "I8")
    if "g_idx" in parts:
        fits = fits and entries[parts["g_idx"]].shape == (width,)
    if not fits:
        raise misfit(entries, module, parts)
    held = held_as(bits, "zero" not in parts, width // groups)
    make = partial(_make_packed, module=module, bits=bits, width=width)
    return Recipe(f"{module}.weight", parts, (num_rows, width), make, held)


def _width(entries: Mapping[str, Entry], parts: Mapping[str, str], small: Small, otherwise: int) -> int:
    """K by weight_shape, if present, because the last word of a row may be partly filled; else `otherwise`."""
    if "shape" not in parts or entries[parts["shape"]].type != "I64" or entries[parts["shape"]].shape != (2,):
        return otherwise
    return int.from_bytes(small(parts["shape"])[8:], "little", signed=True)


def _make_packed(parts: Parts, keep_packed: bool, module: str, bits: int, width: int) -> Weight:
    codes, scales = unpacked(parts["packed"], bits)[:, :width], parts["scale"]
    zeros: Tensor | int = 1 << bits - 1
    if "zero" in parts:
        zeros = parts["zero"]
        is_packed = zeros.dtype == parts["packed"].dtype
        zeros = unpacked(zeros.t(), bits).t()[: len(codes)] if is_packed else zeros.int() + (1 << bits - 1)
    group_of = parts.get("g_idx")
    if group_of is not None and int(group_of.min()) < 0:  # −1 is written if act-order was not used
        group_of = None
    if group_of is not None and int(group_of.max()) >= scales.shape[1]:
        raise ConfigError(
            f"{module}.weight_g_idx names a group beyond its {scales.shape[1]}: fetch the checkpoint again"
        )
    return weight_of(codes, zeros, scales, group_of, keep_packed)


def _int8_recipe(entries: Mapping[str, Entry], module: str) -> Recipe:
    parts = _parts(entries, module, "weight", "scale", "zero")
    require(entries, module, parts, "scale")
    weight, scale = entries[parts["weight"]], entries[parts["scale"]]
    if not scale.arithmetic or len(weight.shape) != 2 or 0 in weight.shape:
        raise misfit(entries, module, parts)
    num_rows, width = weight.shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    fits = scale.shape in ((), (1,), (1, 1), (num_rows,)) or (scale.shape == (num_rows, groups) and width % groups == 0)
    if not fits or ("zero" in parts and entries[parts["zero"]].shape != scale.shape):
        raise misfit(entries, module, parts)
    held = held_as(8, "zero" not in parts, width // groups)
    return Recipe(f"{module}.weight", parts, weight.shape, _make_int8, held)


def _make_int8(parts: Parts, keep_packed: bool) -> Weight:
    weight, scale = parts["weight"], parts["scale"]
    num_rows = len(weight)
    zeros = parts["zero"].int() if "zero" in parts else 0
    if scale.numel() == 1:
        scale = scale.view(1, 1).expand(num_rows, 1)
        zeros = zeros if isinstance(zeros, int) else zeros.view(1, 1).expand(num_rows, 1)
    zeros = zeros if isinstance(zeros, int) else zeros.view(num_rows, -1)
    return weight_of(weight, zeros, scale.view(num_rows, -1), None, keep_packed)
