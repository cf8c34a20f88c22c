"""The kernels that layers call with --deterministic: as octavo.kernels.triton.kernel_set, but a row's bits depend on no other row.
Knows nothing of layers. What is computed number by number (gates, rotations) is the same kernel as ever."""

import torch

from octavo.kernels.triton.elementwise import norm, quantise
from octavo.kernels.triton.elementwise.activation import gate_mul
from octavo.kernels.triton.elementwise.rotation import rotation
from octavo.kernels.triton.gemm.invariant import invariant_fp8 as fp8_product
from octavo.kernels.triton.gemm.invariant import invariant_linear as few_rows_linear
from octavo.kernels.triton.moe.expert_plan import Tiles, fitting

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

IS_INVARIANT = True
_EXPERT_TILES = Tiles(64, 64, 64, 4, 3)


def pays(num_rows: int, n: int, k: int, is_gated: bool = False) -> bool:
    """Always: this is the one product there is."""
    return True


def gated_pays(num_rows: int, weight: torch.Tensor, name: str) -> bool:
    return False


def gated_row_counts(weight: torch.Tensor, name: str, max_rows: int) -> list[int]:
    return []


def gated_linear(x: torch.Tensor, weight: torch.Tensor, name: str, *, pdl: bool = False) -> torch.Tensor:
    raise AssertionError("gated_pays never says so")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, pdl: bool = False) -> torch.Tensor:
    return norm.rms_norm(x, weight, epsilon, is_fixed=True, pdl=pdl)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise.quantise_rows(x, is_fixed=True)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise.rms_norm_fp8(x, weight, epsilon, is_fixed=True)


def silu_mul_fp8(gate_up: torch.Tensor, name: str = "silu") -> tuple[torch.Tensor, torch.Tensor]:
    return quantise.silu_mul_fp8(gate_up, name, is_fixed=True)


def expert_tiles(dtype: torch.dtype, device: torch.device) -> Tiles:
    """One cut of the experts' products for every number of rows: another would take another matrix instruction."""
    return fitting(_EXPERT_TILES, dtype, device)
