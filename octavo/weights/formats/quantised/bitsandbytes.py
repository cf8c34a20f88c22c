"""bitsandbytes: 4-bit codes into a table of 16 values (nf4 or fp4) with a scale per block, and int8 with a scale per row.
Its outlier threshold is ignored: it concerns activations, which are not rounded here.

4 bits: weight holds two codes in a byte, the high half first; weight.absmax the scales of the blocks, which are themselves
codes into weight.nested_quant_map if that exists; weight.quant_map the table; weight.quant_state… JSON with sizes and shape.
int8: weight, and SCB, the largest absolute value of each row."""

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.quants import Weight
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, misfit, require, siblings
from octavo.weights.formats.safetensors_files import Entry

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_PARTS = {
    "weight": ".weight", "absmax": ".weight.absmax", "table": ".weight.quant_map",
    "nested_absmax": ".weight.nested_absmax", "nested_table": ".weight.nested_quant_map",
}  # fmt: skip
_AT_ONCE = 1 << 22  # weights decoded together: bounds the temporaries
_INT8_PARTS = {"weight": ".weight", "largest": ".SCB"}


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    recipes = []
    for name, entry in entries.items():
        if name.endswith(_STATES):
            module = name.split(".weight.quant_state")[0]
            recipes.append(_four_bits(entries, module, _state(small(name), module), name))
        elif name.endswith(".SCB"):
            recipes.append(_int8(entries, name.removesuffix(".SCB")))
        elif name.endswith(".weight") and entry.type in ("U8", "I8") and not _has_state(entries, name):
            raise ConfigError(f"{name} is stored as {entry.type} without its scales: fetch the checkpoint again")
    bits = "8 bits" if settings.get("load_in_8bit") else "4 bits"
    return LoadPlan(f"bitsandbytes, {bits}", recipes, {name for name in entries if name.endswith(".weight_format")})


def _has_state(entries: Mapping[str, Entry], weight: str) -> bool:
    module = weight.removesuffix(".weight")
    return any(f"{module}{suffix}" in entries for suffix in (*_STATES, ".SCB"))


def _four_bits(entries: Mapping[str, Entry], module: str, state: dict[str, Any], name: str) -> Recipe:
    parts = siblings(entries, module, _PARTS)
    require(entries, module, parts, "weight", "absmax", "table")
    is_nested = "nested_absmax" in parts
    if is_nested:
        require(entries, module, parts, "nested_table")
    fits = entries[parts["weight"]].type == "U8" and entries[parts["table"]].shape == (16,)
    fits = fits and (not is_nested or entries[parts["nested_table"]].shape == (256,))
    fits = fits and entries[parts["absmax"]].type == ("U8" if is_nested else "F32")
    shape, block = tuple(_int_settings(state, "shape", module)), _int_settings(state, "blocksize", module)[0]
    num_weights, num_blocks = math.prod(shape), math.prod(entries[parts["absmax"]].shape)
    # A declared block may be larger than the weight: scales would be expanded to its full size.
    block = min(block, num_weights + num_weights % 2)
    fits = (
        fits and entries[parts["weight"]].num_bytes == -(-num_weights // 2) and num_blocks == -(-num_weights // block)
    )
    make = partial(_make_four_bits, shape=shape, block=block)
    if is_nested:
        nested, offset = _int_settings(state, "nested_blocksize", module)[0], state.get("nested_offset")
        nested = min(nested, num_blocks)
        fits = fits and isinstance(offset, float | int)
        fits = fits and math.prod(entries[parts["nested_absmax"]].shape) == -(-num_blocks // nested)
        make = partial(make, nested=nested, offset=offset)
    if not fits:
        raise misfit(entries, module, parts)
    # The state was read above. Listing it as a part keeps it from being yielded as a tensor of its own.
    return Recipe(f"{module}.weight", parts | {"state": name}, shape, make)


def _make_four_bits(
    parts: Parts, keep_packed: bool, shape: tuple[int, ...], block: int, nested: int = 0, offset: float = 0.0
) -> Weight:
    packed, absmax = parts["weight"].view(-1), parts["absmax"].view(-1)
    if nested:  # the blocks' scales are codes with scales of their own
        scales = parts["nested_absmax"].view(-1).float().repeat_interleave(nested)[: len(absmax)]
        absmax = parts["nested_table"].float()[absmax.int()].mul_(scales).add_(offset)
    num_weights, table = math.prod(shape), parts["table"].float()
    out = torch.empty(num_weights, dtype=torch.float32, device=packed.device)
    step = 2 * block * max(1, _AT_ONCE // (2 * block))  # whole blocks and whole bytes
    for start in range(0, num_weights, step):
        bytes_now, scales = packed[start // 2 : (start + step) // 2], absmax[start // block : (start + step) // block]
        now = out[start : start + step]
        codes = torch.stack((bytes_now >> 4, bytes_now & 15), dim=1).view(-1)[: len(now)]
        torch.mul(table[codes.int()], scales.repeat_interleave(block)[: len(now)], out=now)
    return out.view(shape)


def _state(data: bytes, module: str) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the quant_state of {module} is not JSON: fetch the checkpoint again") from error
    if not isinstance(state, dict):
        raise ConfigError(f"the quant_state of {module} is not a JSON object: fetch the checkpoint again")
    return state


def _int_settings(state: dict[str, Any], key: str, module: str) -> list[int]:
    value = state.get(key)
    values: list[Any] = value if isinstance(value, list) and value else [value]
    if not all(type(number) is int and 0 < number < 2**40 for number in values):
        raise ConfigError(f"the quant_state of {module} says {str(value)[:40]!r} for {key}: fetch the checkpoint again")
    return values


def _int8(entries: Mapping[str, Entry], module: str) -> Recipe:
    parts = siblings(entries, module, _INT8_PARTS)
    require(entries, module, parts, *_INT8_PARTS)
    weight, largest = entries[parts["weight"]], entries[parts["largest"]]
    if (
        weight.type != "I8"
        or len(weight.shape) != 2
        or math.prod(largest.shape) != weight.shape[0]
        or not largest.arithmetic
    ):
        raise misfit(entries, module, parts)
    return Recipe(f"{module}.weight", parts, weight.shape, _make_int8)


def _make_int8(parts: Parts, keep_packed: bool) -> Weight:
    return parts["weight"].float().mul_(parts["largest"].float().view(-1, 1) / 127.0)
