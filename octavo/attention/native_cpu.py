"""Attention by the native CPU kernels, in two operations: normalise, rotate and store; then attend. The kernels define the
layout of a page."""

import torch

from octavo.attention.base import LayerHeads
from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.kernels.cpu.attention import MAX_HEAD_SIZE, MAX_PAGE_SIZE, page_bytes
from octavo.kernels.cpu.library import check
from octavo.kernels.cpu.native import Heads, Native
from octavo.kernels.cpu.ops import Step
from octavo.spec import ModelSpec


class NativeCpuAttention:
    name = "native_cpu"
    page_dim = 0
    pages_may_lie_apart = True
    can_capture = False

    def __init__(self, native: Native, kv_dtype: torch.dtype = torch.float32) -> None:
        self._native = native
        self._is_int8 = kv_dtype == torch.int8
        self._kv: list[torch.Tensor] = []
        self._page_size = 0

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        if dtype != torch.float32:
            return f"it computes in float32, not in {dtype}"
        if kv_dtype not in (torch.float32, torch.float16, torch.int8):
            return f"its pages hold float32, float16 or int8, not {kv_dtype}"
        if spec.head_size > MAX_HEAD_SIZE or spec.head_size % 2:
            return f"it supports even head sizes of at most {MAX_HEAD_SIZE}, not {spec.head_size}"
        return None

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        """Shape of a store in elements of its type; an int8 page is a sequence of bytes."""
        if page_size > MAX_PAGE_SIZE:
            raise ConfigError(f"--block-size must be at most {MAX_PAGE_SIZE} with native CPU kernels, got {page_size}")
        num_kv_heads = spec.rank_kv_heads(tensor_parallel)
        self._page_size = page_size
        if self._is_int8:
            return (num_pages, page_bytes(num_kv_heads, spec.head_size, page_size, is_int8=True))
        return (num_pages, 2, num_kv_heads, page_size * spec.head_size)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        self._kv = kv

    def plan(self, batch: Batch) -> None:
        self._step = step_of(batch)

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        store = self._kv[layer.index]
        norms = layer.norms
        return self._native.attend(
            Heads(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                layer.scale,
                layer.window,
                layer.softcap,
                None if norms is None else (norms.q, norms.k, norms.epsilon),
                store,
                self._page_size,
                store.stride(0) * store.element_size(),
                layer.sinks,
                layer.first,
            ),
            heads,
            rotation,
            self._step,
        )


def step_of(batch: Batch) -> Step:
    """The batch in the form the native kernels read. It holds only addresses: the batch must outlive it."""
    table = batch.page_table
    check(table.stride(1) == 1, "a page table must be contiguous")
    for number, group in enumerate(batch.groups):  # the kernels compute a group's addresses from its number
        is_right = group.slots.data_ptr() == batch.slots.data_ptr() + number * batch.slots.nbytes
        is_right = is_right and group.page_table.data_ptr() == table.data_ptr() + number * table.nbytes
        check(is_right, "the slots and page tables of groups must lie behind each other")
    return Step(
        batch.num_tokens,
        batch.sample_at.shape[0],
        batch.num_rows,
        batch.input_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        batch.sample_at.data_ptr(),
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        table.data_ptr(),
        table.stride(0),
    )
