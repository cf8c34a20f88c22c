"""Weights in 8-bit floats with one scale per tensor, per row or per block.

Kernels that multiply packed weights take them as they are, as Quants of the type FP8, where groups of 32 columns have a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quants import Weight
from octavo.quants.writers import fp8

_GROUP = 32
TYPES = ("F8_E4M3", "F8_E5M2")  # names in safetensors headers


def block_of(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale, derived from both shapes; None: the shapes do not match.
    `block`: the block size the checkpoint declares, if any."""
    if len(weight) < 2 or 0 in weight:
        return None
    num_rows, width = weight[-2:]
    if all(extent == 1 for extent in scale):
        return num_rows, width
    if scale in ((*weight[:-1], 1), weight[:-1]):
        return 1, width
    if block is None or len(scale) != len(weight) or scale[:-2] != weight[:-2]:
        return None
    # A declared block may be larger than the matrix: `scaled` would expand scales to its full size.
    block = (min(block[0], num_rows), min(block[1], width))
    fits = scale[-2:] == (-(-num_rows // block[0]), -(-width // block[1]))
    return block if fits else None


def scaled(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., N, K] → float32: each number times the scale of its block. Blocks at the edges may be partial."""
    num_rows, width = weight.shape[-2:]
    out = weight.float()
    scale = scale.float()
    if scale.numel() == 1:
        return out.mul_(scale.view(()))
    if block == (1, width):
        return out.mul_(scale.view(*weight.shape[:-1], 1))
    columns = scale.repeat_interleave(block[1], dim=-1)[..., :width]  # [..., blocks, K]
    for index, first in enumerate(range(0, num_rows, block[0])):
        out[..., first : first + block[0], :].mul_(columns[..., index : index + 1, :])
    return out


def held_as(weight: tuple[int, ...], type: str, block: tuple[int, int]) -> str:
    """The type that weight_of returns with keep_packed; "": float32. `type`: of the numbers."""
    fits = len(weight) == 2 and type == "F8_E4M3" and weight[1] % _GROUP == 0 and block[1] % _GROUP == 0
    return "FP8" if fits else ""


def weight_of(weight: Tensor, scale: Tensor, block: tuple[int, int], keep_packed: bool) -> Weight:
    """Make the weight: Quants if `keep_packed` is set and it has that form, else float32."""
    is_e4m3 = weight.dtype == torch.float8_e4m3fn
    if not (keep_packed and is_e4m3 and held_as(tuple(weight.shape), "F8_E4M3", block)):
        return scaled(weight, scale, block)
    num_rows, width = weight.shape
    high, wide = block
    scales = (
        scale.float().reshape(-(-num_rows // high), -(-width // wide))
        if scale.numel() > 1
        else scale.float().view(1, 1)
    )
    # A block at the edge may be partial.
    scales = scales.repeat_interleave(wide // _GROUP, dim=1)[:, : width // _GROUP]
    if scales.shape[1] == 1:
        scales = scales.expand(-1, width // _GROUP)
    return fp8(scales.repeat_interleave(high, dim=0)[:num_rows], weight)
