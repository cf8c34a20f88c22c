"""The steps between the QKV product and the KV store: RMSNorm of each q and k head, then RoPE. In plain torch; backends
with a fused kernel take the same inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each q and k head (Qwen3, Gemma 3, …). Weights are in interleaved pair order."""

    q: torch.Tensor  # [D] in the heads' type or float32
    k: torch.Tensor  # [D]
    epsilon: float


def qk_norm_rope(
    heads: torch.Tensor, num_heads: int, num_kv_heads: int, rotation: torch.Tensor | None, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k in place: heads [T, H + 2 Hkv, D] → its views q [T, H, D], k and v [T, Hkv, D]."""
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        for part, weight in ((q, norms.q), (k, norms.k)):
            part.copy_(F.rms_norm(part.to(weight.dtype), weight.shape, weight, norms.epsilon))
    if rotation is not None:
        rotate(heads[:, : num_heads + num_kv_heads], rotation)
    return q, k, v


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Apply RoPE in place to heads [T, n, D] with interleaved pairs; rotation [T, 1, D/2] complex."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        heads.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotation).flatten(-2))
