"""The kernels that layers call where a GPU and Triton are there; loaded by name, because Triton may be missing elsewhere.
Knows nothing of layers."""

from octavo.kernels.activation import silu_mul as gated
from octavo.kernels.few_rows import few_rows_linear, pays
from octavo.kernels.norm import rms_norm

__all__ = ["few_rows_linear", "gated", "pays", "rms_norm"]
