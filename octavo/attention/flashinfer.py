"""Attention on GPUs by the package flashinfer: its paged decode and prefill kernels, planned on the host once a step.

A store is [pages, 2, Hkv, page_size, D], which the package calls HND. The package compiles kernels on first use, 100 to 600
seconds of CPU time per kind of layer, and caches them in ~/.cache/flashinfer. The calls match its versions 0.6.6 to 0.7.2."""

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octavo.attention.base import LayerHeads, storable
from octavo.attention.qk_norm_rope import qk_norm_rope
from octavo.batch import Batch
from octavo.device import Event
from octavo.spec import ModelSpec

_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
# For partial results of rows whose pages are split among several blocks. A plan needs at most 2 blocks per SM · 128 query
# rows · D · 4 bytes, in older versions times H / Hkv: 138 MB for 132 SMs, D = 128 and H / Hkv = 8.
_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages that each row of a step reads, row after row, in the package's format."""

    num_decodes: int
    query_start: torch.Tensor  # [B + 1] int32, on the host
    page_start: torch.Tensor  # [B + 1] int32, on the host: row b has pages[page_start[b] : page_start[b + 1]]
    pages: torch.Tensor  # [page_start[B]] int32, on the page table's device
    last_page_len: torch.Tensor  # [B] int32, on the host: tokens in a row's last page; 0: the row has no page

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> "PageLists":
        lens = np.array(batch.seq_lens_host, dtype=np.int32)
        counts = -(-lens // page_size)
        return cls(
            batch.num_decodes,
            _starts(np.array(batch.query_lens_host, dtype=np.int32)),
            _starts(counts),
            _listed(batch, page_size, int(counts.sum())),
            torch.from_numpy(lens - np.maximum(counts - 1, 0) * page_size),
        )

    def decodes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """page_start, pages and last_page_len of the decode rows."""
        num, end = self.num_decodes, int(self.page_start[self.num_decodes])
        return self.page_start[: num + 1], self.pages[:end], self.last_page_len[:num]

    def chunks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """query_start, page_start, pages and last_page_len of the longer rows, counted from the first of them."""
        num, first = self.num_decodes, int(self.page_start[self.num_decodes])
        start = self.page_start[num:] - first
        return self.query_start[num:] - num, start, self.pages[first:], self.last_page_len[num:]


def _starts(counts: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> torch.Tensor:
    """Exclusive prefix sums with the total: [B] → [B + 1]."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)


def _listed(batch: Batch, page_size: int, num_pages: int) -> torch.Tensor:
    """The used entries of the page table [B, M], row after row, computed on its device so that no copy is awaited."""
    counts = (batch.seq_lens + (page_size - 1)) // page_size
    rows = torch.repeat_interleave(counts, output_size=num_pages)  # [N]; output_size avoids a synchronisation
    starts = counts.cumsum(0) - counts
    columns = torch.arange(num_pages, device=rows.device) - starts[rows]
    return batch.page_table[rows, columns]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The parameters of a plan. Layers with equal ones share a plan."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    scale: float
    window: int
    softcap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


class _Wrappers:
    """The package's two wrappers for layers of one kind."""

    def __init__(self, kind: _Kind, workspace: torch.Tensor) -> None:
        flashinfer = importlib.import_module("flashinfer")
        self._kind = kind
        # With tensor cores, decoding supports any number of query heads per KV head, and shares its compiled module with
        # the prefill wrapper if that is "fa2" too. The prefill kernels for newer GPUs need keys in the queries' type.
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend="fa2"
        )
        backend = "auto" if kind.kv_dtype == kind.dtype else "fa2"
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
        self._copied = Event(cuda=workspace.is_cuda)
        self._num_decodes = 0

    def plan(self, lists: PageLists) -> None:
        kind = self._kind
        # A plan fills pinned memory, which is copied to the GPU in stream order while the host runs ahead. The last copy must
        # be done before the memory is filled again.
        self._copied.wait()
        shape = (kind.num_heads, kind.num_kv_heads, kind.head_size, kind.page_size)
        settings = {
            "sm_scale": kind.scale,
            "window_left": kind.window - 1,  # −1: no window
            "logits_soft_cap": kind.softcap,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.kv_dtype,
        }
        self._num_decodes = lists.num_decodes
        if lists.num_decodes:
            self._decode.plan(*lists.decodes(), *shape, **settings)
        if lists.num_decodes < len(lists.last_page_len):
            self._prefill.plan(*lists.chunks(), *shape, causal=True, **settings)
        self._copied.record()

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [T, H, D] → [T, H, D]. q may be a slice of a wider tensor."""
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num = self._num_decodes
        if num:
            self._decode.run(q[:num], kv, out=output[:num])
        if num < len(q):
            self._prefill.run(q[num:], kv, out=output[num:])
        return output


class FlashInferAttention:
    name = "flashinfer"
    page_dim = 0
    pages_may_lie_apart = False
    can_capture = False

    def __init__(self) -> None:
        self._kv: list[torch.Tensor] = []
        self._workspace = torch.empty(0)
        self._wrappers: dict[_Kind, _Wrappers] = {}  # filled by the first step, which runs every layer
        self._lists: PageLists | None = None
        self._write: Write = _torch_write

    def supports(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        if spec.head_size not in _HEAD_SIZES:
            return f"its heads are of {', '.join(map(str, _HEAD_SIZES))} numbers, not of {spec.head_size}"
        if spec.has_sinks:
            return "it does not support attention sinks"
        if dtype not in _DTYPES:
            return f"it computes in bfloat16 or float16, not in {dtype}"
        if kv_dtype not in (dtype, torch.float8_e4m3fn):
            return f"its pages hold {dtype} or torch.float8_e4m3fn, not {kv_dtype}"
        is_8_bit = kv_dtype == torch.float8_e4m3fn
        if is_8_bit and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "8-bit pages need a GPU of NVIDIA's Ada or Hopper generation, or later"
        if not _can_compile() and importlib.util.find_spec("flashinfer_jit_cache") is None:
            return (
                "it compiles its kernels with nvcc, which is not here; install the CUDA toolkit or flashinfer-jit-cache"
            )
        return None

    def kv_shape(self, spec: ModelSpec, num_pages: int, page_size: int, tensor_parallel: int) -> tuple[int, ...]:
        return (num_pages, 2, spec.rank_kv_heads(tensor_parallel), page_size, spec.head_size)

    def bind(self, kv: list[torch.Tensor], max_rows: int) -> None:
        self._kv = kv
        self._workspace = _workspace_on(kv[0].device)
        if kv[0].is_cuda and importlib.util.find_spec("triton") is not None:
            self._write = _fused_write()

    def plan(self, batch: Batch) -> None:
        self._lists = PageLists.of(batch, self._kv[0].shape[3])
        # All kinds before the first layer: the copy that a plan waits for is then a whole step old.
        for wrappers in self._wrappers.values():
            wrappers.plan(self._lists)

    def run(self, layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        kv = self._kv[layer.index]
        q = self._write(layer, heads, rotation, kv, batch.slots)
        return self._wrappers_of(layer, q, kv).run(q, kv).flatten(1)

    def _wrappers_of(self, layer: LayerHeads, q: torch.Tensor, kv: torch.Tensor) -> _Wrappers:
        kind = _Kind(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            kv.shape[3],
            layer.scale,
            layer.window,
            layer.softcap,
            q.dtype,
            kv.dtype,
        )
        if kind not in self._wrappers:
            assert self._lists is not None, "a step is planned before it runs"
            wrappers = self._wrappers[kind] = _Wrappers(kind, self._workspace)
            wrappers.plan(self._lists)
        return self._wrappers[kind]


@functools.cache
def _workspace_on(device: torch.device) -> torch.Tensor:
    """One workspace for all layers and groups, which run one after the other. The package requires zeros."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


Write = Callable[[LayerHeads, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, heads [T, H + 2 Hkv, D], rotation, kv, slots [T]): normalise and rotate q and k, store k and v → q [T, H, D], a
view of heads."""


def _torch_write(
    layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, kv: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    q, k, v = qk_norm_rope(heads, layer.num_heads, layer.num_kv_heads, rotation, layer.norms)
    page_size = kv.shape[3]
    # Every slot lies in a page: only captured steps have padding rows, whose slots do not.
    kv[slots // page_size, :, :, slots % page_size] = storable(torch.stack((k, v), dim=1), kv.dtype)
    return q


def _fused_write() -> Write:
    """_torch_write in one kernel launch."""
    from octavo.kernels.triton.attention.qk_norm_rope_store import qk_norm_rope_store  # needs Triton

    def write(
        layer: LayerHeads, heads: torch.Tensor, rotation: torch.Tensor | None, kv: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        factors = None if rotation is None else torch.view_as_real(rotation)
        q_norm, k_norm, epsilon = None, None, 0.0
        if layer.norms is not None:
            q_norm, k_norm, epsilon = layer.norms.q, layer.norms.k, layer.norms.epsilon
        qk_norm_rope_store(heads, layer.num_heads, layer.num_kv_heads, factors, q_norm, k_norm, epsilon, kv, slots)
        return heads[:, : layer.num_heads]

    return write


def _can_compile() -> bool:
    """Whether the package will find nvcc, by the places where it looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").exists()
