"""RMSNorm and LayerNorm, whole on every rank.
Knows nothing of where in a model it stands."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from octavo.kernels.cpu.native import Norm as NativeNorm
from octavo.layers.context import BuildContext
from octavo.layers.sharding import Slot, Slots, whole


class Norm(nn.Module):
    """[T, D] → [T, D], a new tensor."""

    native: NativeNorm | None = None
    """For native kernels, which take it together with the product that follows."""

    def slots(self, name: str) -> Slots:
        raise NotImplementedError


def norm_slots(norm: Norm | None, name: str) -> Slots:
    """Of a norm that not every family has in its place."""
    return {} if norm is None else norm.slots(name)


class RMSNorm(Norm):
    """x / sqrt(mean(x²) + epsilon) * weight.

    In float32 on a CPU as x / hypot(‖x‖, sqrt(n · epsilon)) * (sqrt(n) · weight): the same number in fewer operations
    than torch's own (10 against 16 µs for 32 rows of 576, 76 against 105 for 512)."""

    def __init__(self, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = context.empty(size)
        self._native = context.native
        if context.native is not None:
            self.native = NativeNorm(self.weight, None, epsilon)
        self.is_short = context.dtype == torch.float32 and context.device.type == "cpu" and context.native is None
        self._floor = torch.tensor(math.sqrt(size * epsilon), dtype=context.dtype)
        self._factor = math.sqrt(size) if self.is_short else 1.0
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            y: torch.Tensor = self._kernels.rms_norm(x, self.weight, self.epsilon, pdl=True)
            return y
        if self._native is not None and self.native is not None:
            return self._native.norm(x, self.native)
        if not self.is_short:
            return F.rms_norm(x, self.shape, self.weight, self.epsilon)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self.weight)

    def slots(self, name: str) -> Slots:
        def store(tensor: torch.Tensor) -> None:
            self.weight.copy_(tensor).mul_(self._factor)

        return {f"{name}.weight": Slot(self.shape, store)}


class LayerNorm(Norm):
    def __init__(self, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = context.empty(size)
        self.bias = context.empty(size)
        self._native = context.native
        if context.native is not None:
            self.native = NativeNorm(self.weight, self.bias, epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None and self.native is not None:
            return self._native.norm(x, self.native)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)

    def slots(self, name: str) -> Slots:
        return whole(f"{name}.weight", self.weight) | whole(f"{name}.bias", self.bias)
