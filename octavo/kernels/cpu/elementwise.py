"""What a step does between products, natively: norms, gates, quantising, the largest logit, rows of a table.
Knows nothing of models. float32 tensors whose last dimension is contiguous."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from octavo.kernels.cpu.build import library_path

GROUP_BYTES = 48  # OctavoGroup: 32 codes, scale, scaled sum, minus sum, unused
_STRIDED = (c_void_p, c_int64)

ARGUMENTS = {
    "octavo_rms_norm": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, *_STRIDED),
    "octavo_silu_mul": (c_void_p, *_STRIDED, c_int64, c_int64, *_STRIDED),
    "octavo_rms_norm_quantise": (c_void_p, *_STRIDED, c_void_p, c_float, c_int64, c_int64, c_int32, c_void_p),
    "octavo_silu_mul_quantise": (c_void_p, *_STRIDED, c_int64, c_int64, c_int32, c_void_p),
    "octavo_argmax": (c_void_p, *_STRIDED, c_int64, c_int64, c_void_p),
    "octavo_gather_rows": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, *_STRIDED),
}


class Pool:
    """Threads and the library. Its owner's thread alone may make calls. A stand-in until library.py has one."""

    def __init__(self, num_threads: int, pin: bool = False) -> None:
        from octavo.kernels.cpu import attention

        self.library = ctypes.CDLL(str(library_path()))
        for name, arguments in {**ARGUMENTS, **attention.ARGUMENTS}.items():
            getattr(self.library, name).argtypes = arguments
        self.library.octavo_threads_new.restype = c_void_p
        self.library.octavo_threads_delete.argtypes = (c_void_p,)
        self.library.octavo_isa.restype = ctypes.c_char_p
        self.handle = self.library.octavo_threads_new(num_threads, int(pin))

    def close(self) -> None:
        self.library.octavo_threads_delete(self.handle)

    def use_isa(self, name: str) -> bool:
        """Of the whole process. False where this CPU has it not."""
        return bool(self.library.octavo_use_isa(name.encode()))


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rms_norm(pool: Pool, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[T, D] → [T, D]."""
    y = torch.empty_like(x)
    rows, size = x.shape
    pool.library.octavo_rms_norm(
        pool.handle, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, pointer(y), size
    )
    return y


def silu_mul(pool: Pool, x: torch.Tensor) -> torch.Tensor:
    """[T, 2 D]: gate, then up → [T, D]."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, size)
    pool.library.octavo_silu_mul(pool.handle, pointer(x), x.stride(0), rows, size, pointer(y), size)
    return y


def rms_norm_quantise(
    pool: Pool, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, tile_rows: int = 1
) -> torch.Tensor:
    """[T, D] → records [T * D / 32, 48] bytes, in the order of the tiles. Weight None: x as it is."""
    rows, size = x.shape
    records = torch.empty(rows * size // 32, GROUP_BYTES, dtype=torch.uint8)
    pool.library.octavo_rms_norm_quantise(
        pool.handle, pointer(x), x.stride(0), pointer(weight), epsilon, rows, size, tile_rows, pointer(records)
    )
    return records


def silu_mul_quantise(pool: Pool, x: torch.Tensor, tile_rows: int = 1) -> torch.Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    records = torch.empty(rows * size // 32, GROUP_BYTES, dtype=torch.uint8)
    pool.library.octavo_silu_mul_quantise(pool.handle, pointer(x), x.stride(0), rows, size, tile_rows, pointer(records))
    return records


def argmax(pool: Pool, logits: torch.Tensor) -> torch.Tensor:
    """[S, V] → [S] int64."""
    chosen = torch.empty(logits.shape[0], dtype=torch.int64)
    pool.library.octavo_argmax(pool.handle, pointer(logits), logits.stride(0), *logits.shape, pointer(chosen))
    return chosen


def gather_rows(pool: Pool, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """table [V, D], contiguous; ids [T] int64 → [T, D]."""
    y = torch.empty(ids.shape[0], table.shape[1])
    pool.library.octavo_gather_rows(
        pool.handle, pointer(table), pointer(ids), ids.shape[0], table.shape[1], pointer(y), table.shape[1]
    )
    return y
