"""RMSNorm and LayerNorm, whole on every rank, and an RMSNorm of what is split over ranks."""

from collections.abc import Callable

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.kernels import device_ops
from octavo.kernels.device_ops import DeviceOps
from octavo.layers.context import BuildContext
from octavo.layers.sharding import WeightSlot, WeightSlots, fill_share, share_size, unsharded


class Norm(nn.Module):
    """[T, D] → [T, D], a new tensor."""

    values: device_ops.NormWeights
    """For products, which may take the norm together with what follows it."""
    ops: DeviceOps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.norm(x, self.values)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): the residual is changed, and returned."""
        return self.ops.add_norm(x, self.values, residual)

    def weight_slots(self, name: str) -> WeightSlots:
        raise NotImplementedError


def norm_slots(norm: Norm | None, name: str) -> WeightSlots:
    """Weight slots of a norm that not every family has: none where it is missing."""
    return {} if norm is None else norm.weight_slots(name)


class RMSNorm(Norm):
    """x / sqrt(mean(x²) + epsilon) * weight.

    The weight is (the checkpoint's + offset) · factor. With an offset it is held in float32: in 16 bits,
    adding 1 to a small weight would round most of its digits away."""

    def __init__(
        self, size: int, epsilon: float, context: BuildContext, *, offset: float = 0.0, factor: float = 1.0
    ) -> None:
        super().__init__()
        dtype = torch.float32 if offset else context.dtype
        self.weight = torch.empty(size, dtype=dtype, device=context.device)
        self.values = device_ops.NormWeights(self.weight, None, epsilon)
        self.ops = context.ops
        self._offset, self._factor = offset, factor * context.ops.norm_factor(size)

    def weight_slots(self, name: str) -> WeightSlots:
        def store(tensor: torch.Tensor) -> None:
            self.weight.copy_(tensor).add_(self._offset).mul_(self._factor)

        return {f"{name}.weight": WeightSlot(tuple(self.weight.shape), store)}


class SplitRMSNorm(nn.Module):
    """An RMSNorm over numbers that are split over ranks, as heads are: each holds its share of them and of the weight.
    `arranged` puts the checkpoint's weight into the order in which the numbers stand."""

    def __init__(
        self, size: int, epsilon: float, context: BuildContext, arranged: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.size, self.epsilon = size, epsilon
        self.group, self.ops = context.group, context.ops
        self.weight = context.empty(share_size(size, context.group))
        self._arranged = arranged
        self._values = device_ops.NormWeights(self.weight, None, epsilon)
        if context.ops.is_invariant and self.group.size > 1:
            raise ConfigError(
                "--deterministic on GPUs is not supported with --tensor-parallel-size for models that normalize all heads together"
            )

    def forward(self, x: torch.Tensor) -> None:
        """x [T, size / ranks], which may be columns of a wider tensor, is changed."""
        if self.group.size == 1:
            self.ops.norm_in_place(x, self._values)
            return
        squares = self.group.all_reduce(x.float().square().sum(dim=-1, keepdim=True))
        x.copy_(x.float() * torch.rsqrt(squares / self.size + self.epsilon) * self.weight)

    def weight_slots(self, name: str) -> WeightSlots:
        def store(tensor: torch.Tensor) -> None:
            fill_share(self.weight, self._arranged(tensor), self.group)

        return {f"{name}.weight": WeightSlot((self.size,), store)}


class LayerNorm(Norm):
    """`is_learned`: a checkpoint has its weight and bias; else they are 1 and 0."""

    def __init__(self, size: int, epsilon: float, context: BuildContext, is_learned: bool = True) -> None:
        super().__init__()
        self.is_learned = is_learned
        self.weight = context.empty(size).fill_(1.0)
        self.bias = context.empty(size).zero_()
        self.values = device_ops.NormWeights(self.weight, self.bias, epsilon)
        self.ops = context.ops

    def weight_slots(self, name: str) -> WeightSlots:
        if not self.is_learned:
            return {}
        return unsharded(f"{name}.weight", self.weight) | unsharded(f"{name}.bias", self.bias)
