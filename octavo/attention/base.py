"""AttentionBackend: the interface between a model's layers and the code that writes and reads KV pages. Each backend
chooses its own page layout."""

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.attention.qk_norm_rope import HeadNorms
from octavo.batch import Batch
from octavo.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The attention parameters of one layer on one rank."""

    index: int  # of its store among the bound ones
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # factor of the scores
    window: int = 0  # a token sees itself and the window − 1 tokens before it; 0: all tokens before it
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0: no cap
    norms: HeadNorms | None = None
    sinks: torch.Tensor | None = (
        None  # [H] float32: per head, one more score in the softmax, whose weight multiplies no value
    )
    first: int = 0  # no token sees the keys before this position, for draft heads; not with flashinfer


class AttentionBackend(Protocol):
    """One instance serves all layers of one rank that share page tables: bind once, then per step plan once and run once
    per layer.

    The softmax is computed in float32, and attention is causal."""

    name: str
    page_dim: int
    """The dimension of a store that counts pages. With it, pages can be copied without knowing the layout."""
    pages_may_lie_apart: bool
    """Whether a store may have gaps between its pages. If so, the parts of a page of all layers are stored side by side."""
    can_capture: bool
    """Whether a CUDA graph of a decode step, plan() and run() included, serves every step with the same number of rows."""

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """None if it can run, else the reason, as text."""

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        """Shape of ONE layer's store (keys and values) on one rank."""

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        """Take every layer's store; layers may share a store and use different pages of it. Stores are zero-filled:
        unwritten cells are read with weight 0, and 0 times NaN is NaN. No step has more than `max_rows` rows."""

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share (indices, masks). Called once a step, before the first layer."""

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Normalise and rotate q and k (qk_norm_rope.py), write k and v, made finite, at batch.slots, then attend with q
        over each row's pages → [T, H * D]. heads [T, H + 2 Hkv, D] is the QKV product and may be changed. A row's output
        never depends on other rows' cells, whatever finite numbers they hold."""


def storable(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in the store's type, with 0 for NaN and infinity: one request's broken numbers must not reach the next owner of
    its page. Numbers beyond the range of an 8-bit store are clamped to it."""
    kv = torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0)
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        kv = kv.clamp(-largest, largest)
    return kv.to(dtype)
