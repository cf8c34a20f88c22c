"""RMSNorm and LayerNorm, whole on every rank.
Knows nothing of where in a model it stands."""

import torch
import torch.nn.functional as F
from torch import nn

from octavo.layers.context import BuildContext
from octavo.layers.sharding import Slots, whole


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = context.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.epsilon)

    def slots(self, name: str) -> Slots:
        return whole(f"{name}.weight", self.weight)


class LayerNorm(nn.Module):
    def __init__(self, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.shape = (size,)
        self.epsilon = epsilon
        self.weight = context.empty(size)
        self.bias = context.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.epsilon)

    def slots(self, name: str) -> Slots:
        return whole(f"{name}.weight", self.weight) | whole(f"{name}.bias", self.bias)
