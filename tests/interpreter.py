"""What Triton's interpreter lacks: it runs kernels on the CPU, and two of its corners are wrong.
Knows nothing of any kernel. Use as an autouse fixture of a file that runs kernels."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes an int of a one-element array in a way that numpy 2.4 refuses, and multiplies the bits
    of bfloat16 numbers as if they were integers."""
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )
