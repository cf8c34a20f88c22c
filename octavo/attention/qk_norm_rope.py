"""What q and k go through between the product and the store: a norm of each head, then the rotation by position.
Knows nothing of pages, or of where the rotation comes from. Plain torch; backends that fuse it read the same inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head, as some families have it. Weights are in the order of the interleaved pairs."""

    q: torch.Tensor  # [D] in the type of the heads, or float32
    k: torch.Tensor  # [D]
    epsilon: float


def turn(
    heads: torch.Tensor, num_heads: int, num_kv_heads: int, rotation: torch.Tensor | None, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """heads [T, H + 2 Hkv, D], changed in place → q [T, H, D], k and v [T, Hkv, D], views of it."""
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        for part, weight in ((q, norms.q), (k, norms.k)):
            part.copy_(F.rms_norm(part.to(weight.dtype), weight.shape, weight, norms.epsilon))
    if rotation is not None:
        rotate(heads[:, : num_heads + num_kv_heads], rotation)
    return q, k, v


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Turn interleaved heads [T, n, D] in place; rotation [T, 1, D/2] complex."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        heads.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotation).flatten(-2))
