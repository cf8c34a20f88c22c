"""Native operations between products: norms, gates, caps, and preparing activations for products. For float32 tensors whose
last dimension is contiguous."""

import ctypes
import functools
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch

from octavo.kernels.cpu.library import Kind, Threads, check, library

_STRIDED = (c_void_p, c_int64)

ARGUMENTS = {
    "octavo_rms_norm": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, *_STRIDED),
    "octavo_rms_norm_add": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, *_STRIDED),
    "octavo_cap": (c_void_p, *_STRIDED, c_int64, c_int64, c_float),
    "octavo_silu_mul": (c_void_p, *_STRIDED, c_int64, c_int64, *_STRIDED),
    "octavo_rms_norm_prepare": (c_void_p, c_int, *_STRIDED, c_void_p, c_float, c_int64, c_int64, c_int32, c_void_p),
}


@functools.cache
def functions() -> ctypes.CDLL:
    """The library with these functions' arguments declared: an undeclared pointer would be truncated to 32 bits."""
    for name, arguments in ARGUMENTS.items():
        getattr(library(), name).argtypes = arguments
    return library()


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_rows(x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    check(x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1, "x must be float32 rows")
    is_right = weight is None or (
        weight.dtype == torch.float32 and weight.shape == x.shape[1:] and weight.is_contiguous()
    )
    check(is_right, f"a norm's weight must be float32 [{x.shape[1]}]")


def rms_norm(threads: Threads, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of rows, [T, D] → [T, D]."""
    _check_rows(x, weight)
    y = torch.empty_like(x)
    rows, size = x.shape
    functions().octavo_rms_norm(
        threads.pointer, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, pointer(y), size
    )
    return y


def rms_norm_add(threads: Threads, x: torch.Tensor, weight: torch.Tensor, epsilon: float, y: torch.Tensor) -> None:
    """Add the RMSNorm of x [T, D] to y [T, D] in place."""
    _check_rows(x, weight)
    _check_rows(y)
    check(x.shape == y.shape, "x and y must have one shape")
    rows, size = x.shape
    functions().octavo_rms_norm_add(
        threads.pointer, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, pointer(y), y.stride(0)
    )


def cap(threads: Threads, x: torch.Tensor, limit: float) -> None:
    """limit · tanh(x / limit) of x [S, V], in place."""
    _check_rows(x)
    functions().octavo_cap(threads.pointer, pointer(x), x.stride(0), *x.shape, limit)


def silu_mul(threads: Threads, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: [T, 2 D], gate then up → [T, D]."""
    _check_rows(x)
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, size)
    functions().octavo_silu_mul(threads.pointer, pointer(x), x.stride(0), rows, size, pointer(y), size)
    return y


def rms_norm_prepare(
    threads: Threads, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, kind: Kind, tile_rows: int = 1
) -> torch.Tensor:
    """RMSNorm of rows, prepared for products: [T, D] → bytes [T, *], in the order of the tiles. Weight None: no norm."""
    _check_rows(x, weight)
    rows, size = x.shape
    prepared = torch.empty(rows, library().octavo_prepared_bytes(kind, 1, size), dtype=torch.uint8)
    functions().octavo_rms_norm_prepare(
        threads.pointer,
        kind,
        pointer(x),
        x.stride(0),
        pointer(weight),
        epsilon,
        rows,
        size,
        tile_rows,
        pointer(prepared),
    )
    return prepared
