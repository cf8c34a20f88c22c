"""The operations of a step in the form that the native executor reads (step.h), and the call that runs them."""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

from octavo.kernels.cpu.attention import AttentionCall, QkNormRopeCall
from octavo.kernels.cpu.experts import ExpertsCall
from octavo.kernels.cpu.library import BadCall, Kind, Product, Threads, library


class Code(IntEnum):
    """OctavoOpCode of step.h."""

    EMBED = 0
    ROTATE = 1
    LINEAR = 2
    GATE = 3
    QK_NORM_ROPE_STORE = 4
    ATTEND = 5
    GATHER = 6
    NORM = 7
    EXPERTS = 8
    CAP = 9


class Count(IntEnum):
    """The number of rows of an operation: the step's tokens, or its samples."""

    PER_TOKEN = 0
    PER_SAMPLE = 1


class Finish(IntEnum):
    """What is done with the result of a product: OctavoFinish of product.h."""

    PLAIN = 0
    GATED = 1  # silu(first half) · second half
    GELU = 2
    GATED_GELU = 3
    RELU = 4
    EXACT_GELU = 5

    @property
    def is_gated(self) -> bool:
        return self in (Finish.GATED, Finish.GATED_GELU)


@functools.cache
def prepared_bytes(kind: Kind, num_rows: int, depth: int) -> int:
    num_bytes: int = library().octavo_prepared_bytes(kind, num_rows, depth)
    return num_bytes


class Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64), ("num_samples", c_int64), ("num_rows", c_int64), ("input_ids", c_void_p),
        ("positions", c_void_p), ("slots", c_void_p), ("sample_at", c_void_p), ("query_start", c_void_p),
        ("seq_lens", c_void_p), ("page_table", c_void_p), ("table_stride", c_int64), ("adapter_of", c_void_p),
        ("adapters", c_void_p), ("num_adapters", c_int64),
    )  # fmt: skip


class Embed(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p), ("num_columns", c_int64), ("depth", c_int64), ("y", c_void_p), ("factor", c_float),
        ("kind", c_int32), ("positions", c_int32),
    )  # fmt: skip


class Rotate(ctypes.Structure):
    _fields_ = (("frequencies", c_void_p), ("y", c_void_p), ("num_frequencies", c_int64), ("amplitude", c_float))


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float))


class Linear(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("x_stride", c_int64), ("depth", c_int64), ("norm", Norm), ("normed", c_void_p),
        ("unfinished", c_void_p), ("prepared", c_void_p), ("products", POINTER(Product)), ("num_products", c_int64),
        ("site", c_int64), ("first_column", c_int64),
    )  # fmt: skip


class Gate(ctypes.Structure):
    _fields_ = (("x", c_void_p), ("y", c_void_p), ("x_stride", c_int64), ("y_stride", c_int64), ("size", c_int64))


class Move(ctypes.Structure):
    _fields_ = (*Gate._fields_, ("norm", Norm), ("adds", c_int32))


class Cap(ctypes.Structure):
    _fields_ = (("x", c_void_p), ("x_stride", c_int64), ("size", c_int64), ("limit", c_float))


class _Body(ctypes.Union):
    _fields_ = (
        ("embed", Embed), ("rotate", Rotate), ("linear", Linear), ("gate", Gate), ("qk_norm_rope", QkNormRopeCall),
        ("attention", AttentionCall), ("move", Move), ("experts", ExpertsCall), ("cap", Cap),
    )  # fmt: skip


class Op(ctypes.Structure):
    _anonymous_ = ("body",)
    _fields_ = (("code", c_int32), ("count", c_int32), ("group", c_int32), ("body", _Body))


def run(threads: Threads, ops: "ctypes.Array[Op]", step: Step, seconds: "ctypes.Array[c_double] | None" = None) -> None:
    """Run the operations. seconds: one number per operation, to which its time is added."""
    failed = _function()(threads.pointer, ops, len(ops), ctypes.byref(step), seconds)
    if failed:
        raise BadCall(
            f"operation {failed - 1}, {Code(ops[failed - 1].code).name}, cannot run: an index or a size is out of range"
        )


def array(ops: Sequence[Op]) -> "ctypes.Array[Op]":
    return (Op * len(ops))(*ops)


@functools.cache
def _function():
    function = library().octavo_run
    function.restype = c_int64
    function.argtypes = (c_void_p, POINTER(Op), c_int64, POINTER(Step), c_void_p)
    return function
