"""The kernels that layers call where a GPU and Triton are there; loaded by name, because Triton may be missing elsewhere.
Knows nothing of layers."""

import torch

from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.elementwise.quantise import quantise_rows, rms_norm_fp8, silu_mul_fp8
from octavo.kernels.triton.elementwise.rotation import rotation
from octavo.kernels.triton.gemm.gated import gated_linear, gated_pays, gated_row_counts
from octavo.kernels.triton.gemm.skinny import few_rows_linear, pays
from octavo.kernels.triton.moe.expert_plan import Tiles

__all__ = [
    "IS_INVARIANT",
    "expert_tiles",
    "few_rows_linear",
    "fp8_product",
    "gate_mul",
    "gated_linear",
    "gated_pays",
    "gated_row_counts",
    "pays",
    "quantise_rows",
    "rms_norm",
    "rms_norm_fp8",
    "rotation",
    "silu_mul_fp8",
]

IS_INVARIANT = False  # a row's bits may depend on how many rows there are: gpu_invariant.py has those that do not


def fp8_product(
    x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [M, K] float8 with scales [M, 1], weight [N, K] float8 with scales [1, N] → [M, N]."""
    # Fast accumulation keeps about 14 bits of the sums: far less is lost by it than by rounding to 4 bits before.
    product: torch.Tensor = torch._scaled_mm(
        x, weight.t(), scale_a=scales, scale_b=weight_scales, out_dtype=dtype, use_fast_accum=True
    )
    return product


def expert_tiles(dtype: torch.dtype, device: torch.device) -> Tiles | None:
    """None: chosen by the rows of each step."""
    return None
