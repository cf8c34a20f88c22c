"""The kernels that layers call where a GPU and Triton are there; loaded by name, because Triton may be missing elsewhere.
Knows nothing of layers."""

from octavo.kernels.activation import gate_mul
from octavo.kernels.few_rows import few_rows_linear, pays
from octavo.kernels.gated import gated_linear, gated_pays, gated_row_counts
from octavo.kernels.norm import rms_norm
from octavo.kernels.rotation import rotation

__all__ = [
    "few_rows_linear",
    "gate_mul",
    "gated_linear",
    "gated_pays",
    "gated_row_counts",
    "pays",
    "rms_norm",
    "rotation",
]
