"""The activations of gates, for kernels in Gluon: they cannot call `activation.activate`, which is Triton's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def activate(x, NAME: gl.constexpr):  # type: ignore[no-untyped-def]
    if NAME == "silu":
        return x / (1.0 + gl.exp(-x))
    # gelu_tanh: 0.5 (1 + tanh u) is 1 / (1 + exp(-2u)); 1.5957… is 2 sqrt(2/π).
    return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
