"""What a step does between products, natively: norms, gates, quantising, the largest logit, rows of a table.
Knows nothing of models. float32 tensors whose last dimension is contiguous."""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from octavo.kernels.cpu.library import Threads, library

GROUP_BYTES = 48  # OctavoGroup: 32 codes, scale, scaled sum, minus sum, unused
_STRIDED = (c_void_p, c_int64)

ARGUMENTS = {
    "octavo_rms_norm": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, *_STRIDED),
    "octavo_rms_norm_add": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, *_STRIDED),
    "octavo_cap": (c_void_p, *_STRIDED, c_int64, c_int64, c_float),
    "octavo_silu_mul": (c_void_p, *_STRIDED, c_int64, c_int64, *_STRIDED),
    "octavo_rms_norm_quantise": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, c_int32, c_void_p),
    "octavo_silu_mul_quantise": (c_void_p, *_STRIDED, c_int64, c_int64, c_int32, c_void_p),
    "octavo_argmax": (c_void_p, *_STRIDED, c_int64, c_int64, c_void_p),
    "octavo_gather_rows": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, *_STRIDED),
}


@functools.cache
def functions() -> ctypes.CDLL:
    """The library, with these functions' arguments declared: undeclared, a pointer would be cut to 32 bits."""
    for name, arguments in ARGUMENTS.items():
        getattr(library(), name).argtypes = arguments
    return library()


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rms_norm(threads: Threads, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[T, D] → [T, D]."""
    y = torch.empty_like(x)
    rows, size = x.shape
    functions().octavo_rms_norm(
        threads.pointer, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, pointer(y), size
    )
    return y


def rms_norm_add(threads: Threads, x: torch.Tensor, weight: torch.Tensor, epsilon: float, y: torch.Tensor) -> None:
    """x [T, D]; y [T, D], changed: the norm of x is added."""
    rows, size = x.shape
    functions().octavo_rms_norm_add(
        threads.pointer, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, pointer(y), y.stride(0)
    )


def cap(threads: Threads, x: torch.Tensor, limit: float) -> None:
    """x [S, V], changed: limit · tanh(x / limit)."""
    functions().octavo_cap(threads.pointer, pointer(x), x.stride(0), *x.shape, limit)


def silu_mul(threads: Threads, x: torch.Tensor) -> torch.Tensor:
    """[T, 2 D]: gate, then up → [T, D]."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, size)
    functions().octavo_silu_mul(threads.pointer, pointer(x), x.stride(0), rows, size, pointer(y), size)
    return y


def rms_norm_quantise(
    threads: Threads, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, tile_rows: int = 1
) -> torch.Tensor:
    """[T, D] → records [T * D / 32, 48] bytes, in the order of the tiles. Weight None: x as it is."""
    rows, size = x.shape
    records = torch.empty(rows * size // 32, GROUP_BYTES, dtype=torch.uint8)
    functions().octavo_rms_norm_quantise(
        threads.pointer, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, tile_rows, pointer(records)
    )
    return records


def silu_mul_quantise(threads: Threads, x: torch.Tensor, tile_rows: int = 1) -> torch.Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    records = torch.empty(rows * size // 32, GROUP_BYTES, dtype=torch.uint8)
    functions().octavo_silu_mul_quantise(
        threads.pointer, pointer(x), x.stride(0), rows, size, tile_rows, pointer(records)
    )
    return records


def argmax(threads: Threads, logits: torch.Tensor) -> torch.Tensor:
    """[S, V] → [S] int64."""
    chosen = torch.empty(logits.shape[0], dtype=torch.int64)
    functions().octavo_argmax(threads.pointer, pointer(logits), logits.stride(0), *logits.shape, pointer(chosen))
    return chosen


def gather_rows(threads: Threads, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """table [V, D], contiguous; ids [T] int64 → [T, D]."""
    y = torch.empty(ids.shape[0], table.shape[1])
    functions().octavo_gather_rows(
        threads.pointer, pointer(table), pointer(ids), ids.shape[0], table.shape[1], pointer(y), table.shape[1]
    )
    return y
