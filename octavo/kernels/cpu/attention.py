"""Native attention over KV pages, and the norm, RoPE and store before it: one call each, over tensors.

Keys are transposed within a page (attention.h has the layout), so only these two calls may read one. Whole pages may be
copied along dimension 0 of a store."""

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from octavo.kernels.cpu.elementwise import pointer
from octavo.kernels.cpu.library import Threads, check, library

MAX_HEAD_SIZE = 256  # and even
MAX_PAGE_SIZE = 256
_LINE = 64


class AttentionCall(ctypes.Structure):
    """OctavoAttention of attention.h, field by field."""

    _fields_ = (
        ("queries", c_void_p), ("query_stride", c_int64), ("output", c_void_p), ("output_stride", c_int64),
        ("pages", c_void_p), ("page_stride", c_int64), ("query_start", c_void_p), ("seq_lens", c_void_p),
        ("page_table", c_void_p), ("table_stride", c_int64), ("num_rows", c_int32), ("num_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_size", c_int32), ("page_size", c_int32), ("is_int8", c_int32),
        ("is_float16", c_int32), ("window", c_int32), ("scale", c_float), ("softcap", c_float), ("sinks", c_void_p),
        ("first", c_int32),
    )  # fmt: skip


class QkNormRopeCall(ctypes.Structure):
    """OctavoQkNormRope of attention.h, field by field."""

    _fields_ = (
        ("heads", c_void_p), ("token_stride", c_int64), ("rotation", c_void_p), ("q_norm", c_void_p),
        ("k_norm", c_void_p), ("epsilon", c_float), ("slots", c_void_p), ("pages", c_void_p), ("page_stride", c_int64),
        ("num_tokens", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32),
        ("page_size", c_int32), ("is_int8", c_int32), ("is_float16", c_int32),
    )  # fmt: skip


@functools.cache
def functions() -> ctypes.CDLL:
    library().octavo_attention.argtypes = (c_void_p, POINTER(AttentionCall))
    library().octavo_qk_norm_rope_store.argtypes = (c_void_p, POINTER(QkNormRopeCall))
    return library()


def page_bytes(
    num_kv_heads: int, head_size: int, page_size: int, is_int8: bool = False, is_float16: bool = False
) -> int:
    """Bytes of one layer's page. Codes and scales are padded, so that every page begins on a cache line."""
    num_cells = 2 * num_kv_heads * page_size
    if not is_int8:
        return num_cells * head_size * (2 if is_float16 else 4)
    return -(-num_cells * (head_size + 4) // _LINE) * _LINE


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer in one tensor."""

    store: torch.Tensor  # [num_pages, 2, Hkv, page_size * D] float32 or 16; [num_pages, page_bytes] uint8: int8 pages
    num_kv_heads: int
    head_size: int
    page_size: int

    def __post_init__(self) -> None:
        expected = page_bytes(self.num_kv_heads, self.head_size, self.page_size, self.is_int8, self.is_float16)
        is_known = self.store.dtype in (torch.float32, torch.float16, torch.uint8)
        check(is_known and self.store[0].is_contiguous(), "a page must be contiguous float32, float16 or bytes")
        check(self.store[0].nbytes == expected, f"a page of {self.store[0].nbytes} bytes, not {expected}")

    @property
    def is_int8(self) -> bool:
        return self.store.dtype == torch.uint8

    @property
    def is_float16(self) -> bool:
        return self.store.dtype == torch.float16

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return self.store.stride(0) * self.store.element_size()


def new_pages(
    num_pages: int, num_kv_heads: int, head_size: int, page_size: int, dtype: torch.dtype = torch.float32
) -> LayerPages:
    """Allocate zero pages. dtype: float32, float16 or int8."""
    if dtype == torch.int8:
        store = torch.zeros(num_pages, page_bytes(num_kv_heads, head_size, page_size, True), dtype=torch.uint8)
    else:
        store = torch.zeros(num_pages, 2, num_kv_heads, page_size * head_size, dtype=dtype)
    return LayerPages(store, num_kv_heads, head_size, page_size)


def check_heads(heads: torch.Tensor, least: int, head_size: int) -> None:
    is_right = heads.dtype == torch.float32 and heads.dim() == 3 and heads.stride()[1:] == (head_size, 1)
    check(is_right and heads.shape[1] >= least, f"heads must be float32 [T, at least {least}, {head_size}]")


def qk_norm_rope_store(
    threads: Threads,
    heads: torch.Tensor,  # [T, H + 2 Hkv, D]: q is changed in place
    num_heads: int,
    pages: LayerPages,
    slots: torch.Tensor,  # [T] int64; −1: not stored
    rotation: torch.Tensor | None = None,  # [T, 1, D/2] complex, or [T, D/2, 2]
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,  # weights for q and for k, [D] each
    epsilon: float = 0.0,
) -> None:
    check_heads(heads, num_heads + 2 * pages.num_kv_heads, pages.head_size)
    check(
        slots.dtype == torch.int64 and slots.shape == heads.shape[:1] and slots.is_contiguous(),
        "slots must be [T] int64",
    )
    q_norm, k_norm = norms if norms is not None else (None, None)
    call = QkNormRopeCall(
        pointer(heads), heads.stride(0), pointer(rotation), pointer(q_norm), pointer(k_norm), epsilon, pointer(slots),
        pointer(pages.store), pages.stride, heads.shape[0], num_heads, pages.num_kv_heads, pages.head_size,
        pages.page_size, pages.is_int8, pages.is_float16,
    )  # fmt: skip
    status = functions().octavo_qk_norm_rope_store(threads.pointer, byref(call))
    check(status == 0, "a head or a page too large, or a head of odd size")


def attend(
    threads: Threads,
    heads: torch.Tensor,  # [T, ≥ H, D]: q first
    num_heads: int,
    pages: LayerPages,
    query_start: torch.Tensor,  # [B + 1] int32
    seq_lens: torch.Tensor,  # [B] int32
    page_table: torch.Tensor,  # [B, M] int32
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    output: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,  # [H] float32
    first: int = 0,
) -> torch.Tensor:
    """Attend with each row's queries over its pages → [T, H * D]."""
    check_heads(heads, num_heads, pages.head_size)
    num_rows = seq_lens.shape[0]
    for column, shape in (
        (query_start, (num_rows + 1,)),
        (seq_lens, (num_rows,)),
        (page_table, (num_rows, page_table.shape[1])),
    ):
        check(column.dtype == torch.int32 and column.shape == shape and column.stride(-1) == 1, "columns must be int32")
    if output is None:
        output = torch.empty(heads.shape[0], num_heads * pages.head_size)
    call = AttentionCall(
        pointer(heads), heads.stride(0), pointer(output), output.stride(0), pointer(pages.store), pages.stride,
        pointer(query_start), pointer(seq_lens), pointer(page_table), page_table.stride(0), seq_lens.shape[0],
        num_heads, pages.num_kv_heads, pages.head_size, pages.page_size, pages.is_int8, pages.is_float16, window, scale,
        softcap, pointer(sinks), first,
    )  # fmt: skip
    status = functions().octavo_attention(threads.pointer, byref(call))
    check(status == 0, "a head or a page too large, or a head of odd size")
    return output
