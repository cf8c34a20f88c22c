"""MXFP4: 4-bit floats, 32 of which share a power of two. NAME_blocks and NAME_scales become NAME, one matrix with all rows
of whatever is stacked in it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.quants import Quants, Weight
from octavo.weights.formats.quantised import LoadPlan, Parts, Recipe, Small, misfit, require, siblings
from octavo.weights.formats.safetensors_files import Entry

_BLOCKS = "_blocks"
_PARTS = {"blocks": _BLOCKS, "scales": "_scales"}
_BLOCK_BYTES = 16  # of 32 weights
_ROWS_AT_ONCE = 4096  # rows decoded together: bounds the temporaries


def plan_load(settings: Mapping[str, Any], entries: Mapping[str, Entry], small: Small) -> LoadPlan:
    names = [name.removesuffix(_BLOCKS) for name in entries if name.endswith(_BLOCKS)]
    return LoadPlan("MXFP4", [_recipe(entries, name) for name in names])


def _recipe(entries: Mapping[str, Entry], name: str) -> Recipe:
    parts = siblings(entries, name, _PARTS)
    require(entries, name, parts, *_PARTS)
    blocks, scales = (entries[parts[part]] for part in _PARTS)
    is_pair = blocks.type == scales.type == "U8" and blocks.shape == (*scales.shape, _BLOCK_BYTES)
    if not is_pair or len(scales.shape) < 2:
        raise misfit(entries, name, parts)
    return Recipe(name, parts, (math.prod(scales.shape[:-1]), 32 * scales.shape[-1]), _make, "MXFP4")


def _make(parts: Parts, keep_packed: bool) -> Weight:
    return _joined(parts["blocks"], parts["scales"])


def _joined(blocks: Tensor, scales: Tensor) -> Quants:
    """blocks [..., G, 16] and scales [..., G] → rows of quants. A byte of a block holds two neighbours, a byte of a quant
    two numbers 16 apart."""
    num_groups = scales.shape[-1]
    blocks, scales = blocks.reshape(-1, num_groups, _BLOCK_BYTES), scales.reshape(-1, num_groups)
    rows = torch.empty(len(scales), num_groups, 1 + _BLOCK_BYTES, dtype=torch.uint8, device=blocks.device)
    rows[:, :, 0] = scales
    for first in range(0, len(scales), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        codes = torch.stack((blocks[some] & 15, blocks[some] >> 4), dim=-1).flatten(-2)  # [n, G, 32]
        rows[some, :, 1:] = codes[:, :, :_BLOCK_BYTES] | codes[:, :, _BLOCK_BYTES:] << 4
    return Quants("MXFP4", rows.flatten(1))
