"""Weights in 8-bit floats with a scale for each output, multiplied with inputs rounded to 8 bits with a scale for each row.
Knows nothing of parts, ranks or what the product is for.

On a GPU the product runs on its 8-bit tensor cores, at twice the rate of 16-bit ones and with half of the bytes to read."""

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm, RMSNorm

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max  # 448
_SMALLEST = 1e-12  # so that a row of zeros has a scale to be divided by
_AT_ONCE = 1 << 24  # numbers of a weight rounded together: bounds the float32 copy, 64 MiB


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """A ConfigError where 8-bit weights cannot be multiplied. Before anything is loaded."""
    if device.type != "cuda":
        raise ConfigError(
            f"--quantization fp8 needs a GPU with 8-bit tensor cores, and this model runs on a {device.type}: leave it out"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError("--quantization fp8 works with 16-bit arithmetic: use it with --dtype bfloat16 or float16")
    quantise_kernels = _kernels()
    if quantise_kernels is None:
        raise ConfigError("--quantization fp8 needs the package triton, which is not installed")
    if not quantise_kernels.has_fp8(device):
        raise ConfigError("--quantization fp8 needs a GPU of NVIDIA's Ada or Hopper generation, or later: leave it out")


def can_hold(out_features: int, in_features: int) -> bool:
    """The product wants multiples of 16; a weight that is none stays as it comes."""
    return out_features % 16 == 0 and in_features % 16 == 0


def saving(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Bytes by which such a weight is smaller than one of `dtype`."""
    return out_features * (in_features * (dtype.itemsize - _DTYPE.itemsize) - torch.float32.itemsize)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] → float8 [N, K] and scales [N, 1] float32, whose product is about rows; each row's largest becomes 448."""
    largest = rows.abs().amax(dim=1, keepdim=True).float().clamp_(min=_SMALLEST)
    scales = largest / _LARGEST
    return (rows.float() / scales).to(_DTYPE), scales


class Fp8Weight(nn.Module):
    """One rank's weight [out, in]. Rows are rounded as they come: no copy in the model's type is ever held."""

    def __init__(self, out_features: int, in_features: int, context: BuildContext) -> None:
        super().__init__()
        assert can_hold(out_features, in_features)
        # Zeros: rows that no part fills give 0.
        self.numbers = torch.zeros((out_features, in_features), dtype=_DTYPE, device=context.device)
        self.scales = torch.zeros((1, out_features), dtype=torch.float32, device=context.device)
        self._dtype = context.dtype
        self._kernels = context.kernels

    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Put `rows` [n, in] from row `first` on."""
        step = max(1, _AT_ONCE // rows.shape[1])
        for start in range(0, len(rows), step):
            numbers, scales = quantise(rows[start : start + step].to(self.numbers.device))
            to = slice(first + start, first + start + len(numbers))
            self.numbers[to] = numbers
            self.scales[0, to] = scales[:, 0]

    def forward(self, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """[T, in] → norm(x) · weightᵀ, [T, out]."""
        if self._kernels is None:
            return self._product(*quantise(x if norm is None else norm(x)))
        if isinstance(norm, RMSNorm):
            return self._product(*self._kernels.rms_norm_fp8(x, norm.weight, norm.epsilon))
        return self._product(*self._kernels.quantise_rows(x if norm is None else norm(x)))

    def after_gate(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        """[T, 2 in] → (name(gate) * up) · weightᵀ, [T, out]. Only with kernels, which know activations by `name`."""
        assert self._kernels is not None
        return self._product(*self._kernels.silu_mul_fp8(gate_up, name))

    def _product(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor
        if self._kernels is not None:
            product = self._kernels.fp8_product(x, scales, self.numbers, self.scales, self._dtype)
        else:
            product = torch._scaled_mm(
                x, self.numbers.t(), scale_a=scales, scale_b=self.scales, out_dtype=self._dtype, use_fast_accum=True
            )
        return product


def _kernels() -> ModuleType | None:
    """By name: Triton may be missing where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("octavo.kernels.triton.elementwise.quantise")
