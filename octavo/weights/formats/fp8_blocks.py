"""Weights in 8-bit floats with one scale per tensor, per row or per block."""

from __future__ import annotations

from torch import Tensor

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
