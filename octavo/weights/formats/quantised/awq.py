"""AWQ: 4 bits, groups with a scale and a zero point, in the "gemm" layout. Other layouts are refused.

qweight [K, N / 8] int32 and qzeros [G, N / 8] hold eight neighbouring columns in a word, in the order of _PLACES;
scales [G, N]. The weight is scale · (code − zero), transposed to [N, K]."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError
from octavo.quants import Weight
from octavo.weights.formats.integer_groups import held_as, unpacked, weight_of
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, int_setting, misfit, require, siblings
from octavo.weights.formats.safetensors_files import Entry

_PARTS = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word, from the lowest, that holds each of its eight columns


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    bits, version = int_setting(settings, "bits", "w_bit", default=4), settings.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise ConfigError(
            f"AWQ with {bits} bits in the layout {version!r} cannot be read; 4 bits in the layout 'gemm' can"
        )
    modules = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
    return LoadPlan("awq, 4 bits", [_recipe(entries, module) for module in modules])


def _recipe(entries: Mapping[str, Entry], module: str) -> Recipe:
    parts = siblings(entries, module, _PARTS)
    require(entries, module, parts, *_PARTS)
    weight, zeros, scales = (entries[parts[part]] for part in _PARTS)
    shapes = (weight.shape, zeros.shape, scales.shape)
    if (weight.type, zeros.type) != ("I32", "I32") or not scales.arithmetic or any(len(shape) != 2 for shape in shapes):
        raise misfit(entries, module, parts)
    (width, words), (groups, num_columns) = weight.shape, scales.shape
    fits = groups > 0 and width % groups == 0 and num_columns == 8 * words and zeros.shape == (groups, words)
    if not fits:
        raise misfit(entries, module, parts)
    held = held_as(4, False, width // groups)
    return Recipe(f"{module}.weight", parts, (num_columns, width), _make, held)


def _make(parts: Parts, keep_packed: bool) -> Weight:
    codes, zeros = (_in_order(parts[part]).t().contiguous() for part in ("qweight", "qzeros"))
    return weight_of(codes, zeros, parts["scales"].t(), None, keep_packed)


def _in_order(words: Tensor) -> Tensor:
    """Unpack [rows, N / 8] → [rows, N], columns in order."""
    return unpacked(words, 4).view(len(words), -1, 8)[:, :, _PLACES].flatten(1)
