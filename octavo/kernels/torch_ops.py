"""DeviceOps by torch alone, on any device; and the activations by name."""

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights, Waves


def activate(x: Tensor, activation: Activation) -> Tensor:
    """x may be changed."""
    match activation:
        case "none":
            return x
        case "silu":
            return F.silu(x, inplace=True)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)


class TorchOps:
    kernels: Literal["torch", "native", "triton"] = "torch"
    is_invariant = False

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        shape = x.shape[-1:]
        if norm.bias is not None:
            return F.layer_norm(x, shape, norm.weight, norm.bias, norm.epsilon)
        return F.rms_norm(x.to(norm.weight.dtype), shape, norm.weight, norm.epsilon).to(x.dtype)

    def add_norm(self, x: Tensor, norm: NormWeights, residual: Tensor) -> Tensor:
        return residual.add_(self.norm(x, norm))

    def norm_in_place(self, x: Tensor, norm: NormWeights) -> None:
        squares = x.float().square().sum(dim=-1, keepdim=True)
        x.copy_(x.float() * torch.rsqrt(squares / x.shape[-1] + norm.epsilon) * norm.weight)

    def norm_factor(self, size: int) -> float:
        return 1.0

    def rotation(self, positions: Tensor, waves: Waves) -> Tensor:
        angles = torch.outer(positions.float(), waves.frequencies)
        return torch.polar(waves.amplitudes.expand_as(angles), angles).unsqueeze(1)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, activation) * up

    def cap(self, x: Tensor, limit: float) -> Tensor:
        return x.div_(limit).tanh_().mul_(limit)

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return x.add_(F.embedding(positions, table))


class TorchFloat32CpuOps(TorchOps):
    """In float32 on a CPU an RMSNorm is x / hypot(‖x‖, sqrt(n · epsilon)) · (sqrt(n) · weight): the same number in fewer
    operations than torch's own (10 against 16 µs for 32 rows of 576, 76 against 105 for 512)."""

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        if norm.bias is not None:
            return super().norm(x, norm)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(_floor(x.shape[-1], norm.epsilon))
        return torch.div(x, length).mul_(norm.weight)

    def norm_factor(self, size: int) -> float:
        return math.sqrt(size)


@functools.cache
def _floor(size: int, epsilon: float) -> Tensor:
    return torch.tensor(math.sqrt(size * epsilon), dtype=torch.float32)


def torch_ops(device: torch.device, dtype: torch.dtype) -> TorchOps:
    is_short = device.type == "cpu" and dtype == torch.float32
    return TorchFloat32CpuOps() if is_short else TorchOps()
