"""AttentionBackend: the seam between a model's layers and whatever writes and reads the KV pages.
Knows nothing of models or of how a backend lays out a page."""

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.attention.qk_norm_rope import HeadNorms
from octavo.batch import Batch
from octavo.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """How one layer attends, on one rank."""

    index: int  # which of the bound stores is its own
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # scores are multiplied by it
    window: int = 0  # a token sees itself and the window − 1 before it; 0: everything before it
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0: they stay
    norms: HeadNorms | None = None
    sinks: torch.Tensor | None = (
        None  # [H] float32: a score of each head beside those of the keys, whose weight is lost
    )


class AttentionBackend(Protocol):
    """One instance serves all layers of one rank that share page tables: bind once, then per step plan once and run once
    for each layer.

    The softmax is computed in float32, attention is causal."""

    name: str
    page_dim: int
    """The dimension of a store that counts pages, so that others can copy whole pages without knowing the layout."""
    pages_may_lie_apart: bool
    """Whether pages of one store may have something else between them: then the layers' parts of a page lie side by side."""
    can_capture: bool
    """Whether a CUDA graph of a decode step, plan() and run() together, serves every step of as many rows."""

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """None where it can run, else why not, in words."""

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        """Shape of ONE layer's store (keys and values) on one rank."""

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        """Hand over every layer's store (several may have the same, and other pages), zero-filled: unwritten cells are read with weight 0, and 0 times NaN is NaN.
        No step will have more than `max_rows` rows."""

    def plan(self, batch: Batch) -> None:
        """Once a step, before the first layer: what all layers share (indices, masks)."""

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """heads [T, H + 2 Hkv, D] come from the product and may be changed. Turn q and k (turn.py), write k and v, made
        finite, at batch.slots, then attend with q over each row's pages → [T, H * D]. No row's output depends on cells
        that are not its own, whatever finite numbers they hold."""


def storable(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in the store's type, with 0 for NaN and infinities: what one request's numbers broke must not reach the
    next owner of its page. What an 8-bit store cannot hold becomes its largest number."""
    kv = torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0)
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        kv = kv.clamp(-largest, largest)
    return kv.to(dtype)
