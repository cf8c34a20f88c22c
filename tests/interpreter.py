"""Triton's interpreter runs kernels on the CPU; this fixes wrong results, and removes needless slowness.
tests/kernels/conftest.py uses it for every test there; elsewhere, call it from a fixture."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch Triton 3.6 to 3.9. Does nothing where kernels are compiled."""
    if not triton.knobs.runtime.interpret:
        return
    _round_to_nearest(monkeypatch)
    _multiply_numbers(monkeypatch)
    _compare_to_truth(monkeypatch)
    _count_to_loaded_bounds(monkeypatch)
    _replace_the_language_once(monkeypatch)


def _round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round as a GPU does: the interpreter truncates to bfloat16, and loses the carry where rounding to 8 bits reaches a power of two."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if source not in _TYPES or target not in _TYPES:
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.array(data)).view(_TYPES[source]).float()
        if target == tl.float8e4nv:
            numbers = numbers.clamp(-448, 448)  # as the instruction saturates
        return numbers.to(_TYPES[target]).view(_BITS[_TYPES[target].itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def _multiply_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply values, and each row of a tile by itself. The interpreter stores bfloat16 as bits, and multiplies matrices of those bits; and
    a BLAS may sum the rows of one matrix in different orders, as no GPU does."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def by_rows(self, a, b, d, *rest):
        a, b = widened(a), widened(b)
        rows = interpreter.TensorHandle(a.data[..., None, :], a.dtype.scalar)
        columns = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype.scalar)
        start = interpreter.TensorHandle(d.data[..., None, :], d.dtype.scalar)
        product = dot(self, rows, columns, start, *rest)
        return interpreter.TensorHandle(product.data[..., 0, :], product.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", by_rows)


def _compare_to_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of compared scalars boolean: the interpreter makes them integers, which 3.9 does not accept as a mask."""
    splat = interpreter.InterpreterBuilder.create_splat

    def splatted(self, shape, handle):
        if handle.data.dtype == np.bool_:
            handle = interpreter.TensorHandle(handle.data, tl.int1)
        return splat(self, shape, handle)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splatted)


def _count_to_loaded_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert one-element arrays in a way that numpy 2.4 accepts; 3.6's own conversion raises."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def _replace_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the language once per launch: the interpreter does so again for every function called, a millisecond each."""
    replace = interpreter._patch_lang
    # Functions see the language through either of these modules.
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    nothing = SimpleNamespace(restore=lambda: None)
    is_replaced = False

    def replace_once(_):
        nonlocal is_replaced
        if is_replaced:
            return nothing
        scope = replace(both)
        is_replaced = True
        restore = scope.restore

        def restored():
            nonlocal is_replaced
            is_replaced = False
            restore()

        scope.restore = restored
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)


def cases(everything: Iterable[Any], *few: Any) -> list[Any]:
    """`everything` where kernels are compiled; in the interpreter, which is a thousand times slower, only `few`: the cases that
    reach every branch."""
    return list(few) if triton.knobs.runtime.interpret else list(everything)
