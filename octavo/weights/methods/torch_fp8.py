"""Weights in 8-bit floats with a scale for each output, multiplied with inputs rounded to 8 bits with a scale for each row.

On a GPU the product runs on its 8-bit tensor cores, at twice the rate of 16-bit ones and with half of the bytes to read.
This file rounds inputs by torch, on any device; triton_fp8.py does so in kernels."""

import importlib
import importlib.util

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.quants import Weight
from octavo.weights.methods.base import (
    HeldWeight,
    LinearMethod,
    Method,
    Settings,
    Use,
    WeightRequest,
    decoded,
)

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max  # 448
_SMALLEST = 1e-12  # so that a row of zeros has a scale to be divided by
_AT_ONCE = 1 << 24  # numbers of a weight rounded together: bounds the float32 copy, 64 MiB


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where 8-bit weights cannot be multiplied. For before anything is loaded."""
    if device.type != "cuda":
        raise ConfigError(
            f"--quantization fp8 needs a GPU with 8-bit tensor cores, and this model runs on a {device.type}: leave it out"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError("--quantization fp8 works with 16-bit arithmetic: use it with --dtype bfloat16 or float16")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--quantization fp8 needs the package triton, which is not installed")
    # By name: Triton may be missing.
    if not importlib.import_module("octavo.kernels.triton.elementwise.quantise").has_fp8(device):
        raise ConfigError("--quantization fp8 needs a GPU of NVIDIA's Ada or Hopper generation, or later: leave it out")


def supports_shape(request: WeightRequest) -> str | None:
    if request.use is not Use.PRODUCT:
        return f"a {request.use.value} stays more exact"
    if request.out_features % 16 or request.in_features % 16:
        return f"the product wants multiples of 16, not {request.out_features} by {request.in_features}"
    return None


def supports(request: WeightRequest, settings: Settings) -> str | None:
    return supports_shape(request) if settings.quantization == "fp8" else "not asked for"


def saving(request: WeightRequest, dtype: torch.dtype) -> int:
    """Bytes by which the weight is smaller than in `dtype`; 0: it cannot be held in 8 bits."""
    if supports_shape(request) is not None:
        return 0
    return request.out_features * (request.in_features * (dtype.itemsize - _DTYPE.itemsize) - torch.float32.itemsize)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] → float8 [N, K] and scales [N, 1] float32, whose product is about rows; each row's largest becomes 448."""
    largest = rows.abs().amax(dim=1, keepdim=True).float().clamp_(min=_SMALLEST)
    scales = largest / _LARGEST
    return (rows.float() / scales).to(_DTYPE), scales


class Fp8Weight(HeldWeight):
    """Rows are rounded as they come: no copy in the model's type is ever held."""

    name = "fp8"

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        super().__init__(settings.ops)
        self._request, self._dtype = request, settings.dtype
        # Zeros: rows that no part fills give 0.
        shape = request.out_features, request.in_features
        self.numbers = torch.zeros(shape, dtype=_DTYPE, device=settings.device)
        self.scales = torch.zeros((1, request.out_features), dtype=torch.float32, device=settings.device)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def fill(self, part: int, rows: Weight) -> None:
        mine, first = decoded(rows), self._request.rows(part).start
        step = max(1, _AT_ONCE // mine.shape[1])
        for start in range(0, len(mine), step):
            numbers, scales = quantise(mine[start : start + step].to(self.numbers.device))
            to = slice(first + start, first + start + len(numbers))
            self.numbers[to] = numbers
            self.scales[0, to] = scales[:, 0]

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        y = self._multiply(*self._rounded(x, norm))
        return activate(y if bias is None else y.add_(bias), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._added(self._multiply(*self._rounded(x, None)), bias, residual)

    def _added(self, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if bias is not None:
            y.add_(bias)
        return y if residual is None else y.add_(residual)

    def _rounded(self, x: Tensor, norm: NormWeights | None) -> tuple[Tensor, Tensor]:
        return quantise(self._normed(x, norm))

    def _multiply(self, x: Tensor, scales: Tensor) -> Tensor:
        """x [T, in] float8 with scales [T, 1] → [T, out]."""
        # Fast accumulation keeps about 14 bits of the sums: rounding the operands to e4m3 (4 significant bits) loses far more.
        product: Tensor = torch._scaled_mm(
            x, self.numbers.t(), scale_a=scales, scale_b=self.scales, out_dtype=self._dtype, use_fast_accum=True
        )
        return product


LINEAR: LinearMethod = Method("torch_fp8", supports, Fp8Weight)
