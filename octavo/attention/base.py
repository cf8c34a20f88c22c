"""AttentionBackend: the seam between a model's layers and whatever writes and reads the KV pages.
Knows nothing of models or of how a backend lays out a page."""

from typing import Protocol

import torch

from octavo.batch import Batch
from octavo.spec import ModelSpec


class AttentionBackend(Protocol):
    """One instance serves all layers of one rank: bind once, then per step plan once and run once for each layer.

    Scores are scaled by head_size ** -0.5, the softmax is computed in float32, attention is causal."""

    name: str
    page_dim: int
    """The dimension of a store that counts pages, so that others can copy whole pages without knowing the layout."""

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None where it can run, else why not, in words."""

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        """Shape of ONE layer's store (keys and values) on one rank."""

    def bind(self, kv: list[torch.Tensor]) -> None:
        """Hand over each layer's store, zero-filled: unwritten cells are read with weight 0, and 0 times NaN is NaN."""

    def plan(self, batch: Batch) -> None:
        """Once a step, before the first layer: what all layers share (indices, masks)."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write k and v [T, Hkv, D], made finite, at batch.slots, then attend with q [T, H, D] over each row's pages
        → [T, H * D]. No row's output depends on cells that are not its own, whatever finite numbers they hold."""


def finite(kv: torch.Tensor) -> torch.Tensor:
    """A copy with 0 for NaN and infinities: what one request's numbers broke must not reach the next owner of its page."""
    return torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0)
