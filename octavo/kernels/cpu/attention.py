"""Attention over KV pages and the turn before it, natively: tensors in, one call each.
Knows nothing of models, batches or backends. float32; pages are [pages, 2, Hkv, page_size, D], float32 or int8 with
scales [pages, 2, Hkv, page_size]. Inside a page keys lie transposed (attention.h): only these two calls may read one."""

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p

import torch

from octavo.kernels.cpu.elementwise import pointer
from octavo.kernels.cpu.library import Threads, library

MAX_HEAD_SIZE = 256
MAX_PAGE_SIZE = 256


class _Attention(ctypes.Structure):
    _fields_ = (
        ("queries", c_void_p), ("query_stride", c_int64), ("output", c_void_p), ("output_stride", c_int64),
        ("pages", c_void_p), ("scales", c_void_p), ("query_start", c_void_p), ("seq_lens", c_void_p),
        ("page_table", c_void_p), ("table_stride", c_int64), ("num_rows", c_int32), ("num_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_size", c_int32), ("page_size", c_int32), ("window", c_int32),
        ("scale", c_float), ("softcap", c_float),
    )  # fmt: skip


class _Turn(ctypes.Structure):
    _fields_ = (
        ("heads", c_void_p), ("token_stride", c_int64), ("rotation", c_void_p), ("q_norm", c_void_p),
        ("k_norm", c_void_p), ("epsilon", c_float), ("slots", c_void_p), ("pages", c_void_p), ("scales", c_void_p),
        ("num_tokens", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32),
        ("page_size", c_int32),
    )  # fmt: skip


@functools.cache
def functions() -> ctypes.CDLL:
    library().octavo_attention.argtypes = (c_void_p, POINTER(_Attention))
    library().octavo_turn.argtypes = (c_void_p, POINTER(_Turn))
    return library()


def turn_and_store(
    threads: Threads,
    heads: torch.Tensor,  # [T, H + 2 Hkv, D]: q is changed in place
    num_heads: int,
    pages: torch.Tensor,
    slots: torch.Tensor,  # [T] int64; −1: nowhere
    rotation: torch.Tensor | None = None,  # [T, 1, D/2] complex, or [T, D/2, 2]
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,  # of q and of k, [D]
    epsilon: float = 0.0,
    scales: torch.Tensor | None = None,
) -> None:
    q_norm, k_norm = norms if norms is not None else (None, None)
    call = _Turn(
        pointer(heads), heads.stride(0), pointer(rotation), pointer(q_norm), pointer(k_norm), epsilon, pointer(slots),
        pointer(pages), pointer(scales), heads.shape[0], num_heads, pages.shape[2], heads.shape[2], pages.shape[3],
    )  # fmt: skip
    status = functions().octavo_turn(threads.pointer, byref(call))
    assert status == 0, "a head or a page too large"


def attend(
    threads: Threads,
    heads: torch.Tensor,  # [T, ≥ H, D]: q comes first
    num_heads: int,
    pages: torch.Tensor,
    query_start: torch.Tensor,  # [B + 1] int32
    seq_lens: torch.Tensor,  # [B] int32
    page_table: torch.Tensor,  # [B, M] int32
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    scales: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """→ [T, H * D]."""
    num_tokens, _, head_size = heads.shape
    if output is None:
        output = torch.empty(num_tokens, num_heads * head_size)
    call = _Attention(
        pointer(heads), heads.stride(0), pointer(output), output.stride(0), pointer(pages), pointer(scales),
        pointer(query_start), pointer(seq_lens), pointer(page_table), page_table.stride(0), seq_lens.shape[0], num_heads,
        pages.shape[2], head_size, pages.shape[3], window, scale, softcap,
    )  # fmt: skip
    status = functions().octavo_attention(threads.pointer, byref(call))
    assert status == 0, "a head or a page too large"
    return output
