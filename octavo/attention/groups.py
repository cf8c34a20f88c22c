"""Attention for groups of layers with separate page tables: one backend instance per group, all of one class."""

from collections.abc import Sequence

import torch

from octavo.attention.base import AttentionBackend, LayerHeads
from octavo.batch import Batch
from octavo.spec import ModelSpec


class GroupedAttention:
    """A backend that forwards to the backend of the layer's group. Each group has its own instance because a backend's plan
    may depend on the pages."""

    def __init__(self, backends: Sequence[AttentionBackend], group_of: Sequence[int]) -> None:
        """`group_of`: layer index → group."""
        self._backends, self._group_of = backends, group_of
        first = backends[0]
        self.name, self.page_dim, self.can_capture = first.name, first.page_dim, first.can_capture
        self.pages_may_lie_apart = first.pages_may_lie_apart

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        return self._backends[0].supports(spec, device, dtype, kv_dtype)

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        shapes = {backend.kv_shape(spec, num_pages, page_size, tensor_parallel) for backend in self._backends}
        (shape,) = shapes
        return shape

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        """Layers of different groups may share a store: they use different pages of it."""
        for backend in self._backends:
            backend.bind(kv, max_rows)

    def plan(self, batch: Batch) -> None:
        for backend, part in zip(self._backends, batch.groups, strict=True):
            backend.plan(part)

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        group = self._group_of[layer.index]
        return self._backends[group].run(layer, heads, rotation, batch.groups[group])
