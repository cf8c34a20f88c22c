"""RoPE factors for a step's positions in one launch."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.runtime.launch import Launcher


@triton.jit
def _rotation(positions, frequencies, out, amplitude, HALF: tl.constexpr, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PADDED)
    is_pair = pair < HALF
    frequency = tl.load(frequencies + pair, mask=is_pair, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    stretch = tl.where(frequency == 0.0, 1.0, amplitude)
    place = out + token * (2 * HALF) + 2 * pair
    tl.store(place, stretch * tl.cos(angle), mask=is_pair)
    tl.store(place + 1, stretch * tl.sin(angle), mask=is_pair)


_launch_rotation = Launcher(_rotation)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> torch.Tensor:
    """positions [T] int64, frequencies [D/2] float32 → [T, D/2, 2] float32: amplitude times cosine and sine of each angle.
    A pair of frequency 0 is not rotated, and not multiplied by the amplitude."""
    half = frequencies.shape[0]
    out = torch.empty((positions.shape[0], half, 2), dtype=torch.float32, device=positions.device)
    _launch_rotation(
        (positions.shape[0], 1, 1),
        (positions, frequencies, out, amplitude),
        (half, 1 << (half - 1).bit_length()),
        {"num_warps": 1},
    )
    return out
