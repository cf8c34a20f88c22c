"""Native sampling: all rows of a step in one call, distributed over the threads. A record holds a row's parameters."""

import ctypes
import functools
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.cpu.library import Threads, check, library

# The parameters of a row: OctavoChoice. sampling.h describes the fields.
RECORD = np.dtype(
    [
        ("uniform", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("tokens", np.uintp),  # address of int32s
        ("mask", np.uintp),  # address of uint32s
        ("prompt_len", np.int64),
        ("len", np.int64),
        ("temperature", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("is_greedy", np.int32),
        ("unused", np.int32),
    ]
)
Records = NDArray[np.void]
Ints = NDArray[np.int64]


ARGUMENTS = {
    "octavo_uniforms": (c_void_p, c_void_p, c_int64, c_void_p),
    "octavo_sample": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p),
}


@functools.cache
def functions() -> ctypes.CDLL:
    """The library with these functions' arguments declared: an undeclared pointer would be truncated to 32 bits."""
    for name, arguments in ARGUMENTS.items():
        getattr(library(), name).argtypes = arguments
    return library()


def new_records(num_rows: int) -> Records:
    """Records of zeros. Their temperature is 0 too: the caller sets it, or is_greedy."""
    return np.zeros(num_rows, RECORD)


def fill_uniforms(records: Records, seeds: Ints, positions: Ints) -> None:
    """Set one uniform per (seed, position), [S] each: the same as sampling/randomness.py, in a tenth of the time."""
    for column in (seeds, positions):
        is_right = column.dtype == np.int64 and column.shape == records.shape and column.flags.c_contiguous
        check(is_right, "seeds and positions must be int64, one for each record")
    check(records.dtype == RECORD and records.flags.c_contiguous, "records must be contiguous")
    functions().octavo_uniforms(seeds.ctypes.data, positions.ctypes.data, len(records), records.ctypes.data)


def choose(threads: Threads, logits: torch.Tensor, records: Records, chosen: torch.Tensor) -> None:
    """Choose tokens from logits [S, V] float32 by records [S] into chosen [S] int64. Penalised and masked rows of the logits
    are changed."""
    num_rows, vocab_size = logits.shape
    check(
        logits.dtype == torch.float32 and logits.stride(1) == 1 and 0 < vocab_size < 2**31,
        "logits must be float32 [S, V]",
    )
    is_right = records.dtype == RECORD and records.shape == (num_rows,) and records.flags.c_contiguous
    check(is_right, f"there must be {num_rows} records")
    is_right = chosen.dtype == torch.int64 and chosen.shape == (num_rows,) and chosen.is_contiguous()
    check(is_right, f"chosen must be int64 [{num_rows}]")
    functions().octavo_sample(
        threads.pointer,
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        records.ctypes.data,
        chosen.data_ptr(),
    )
