"""DeviceOps by the native CPU kernels, in float32. Each can be recorded on a tape; what torch computes cannot."""

import torch
from torch import Tensor

from octavo.kernels.cpu.native import Native
from octavo.kernels.device_ops import NormWeights, Waves
from octavo.kernels.torch_ops import TorchOps


class NativeOps(TorchOps):
    """A gate is torch's: where a kernel applies one, it is part of the product before it."""

    kernels = "native"

    def __init__(self, native: Native) -> None:
        self.native = native

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        return self.native.norm(x, norm)

    def add_norm(self, x: Tensor, norm: NormWeights, residual: Tensor) -> Tensor:
        return self.native.add_norm(x, norm, residual)

    def norm_in_place(self, x: Tensor, norm: NormWeights) -> None:
        self.native.norm_in_place(x, norm)

    def rotation(self, positions: Tensor, waves: Waves) -> Tensor:
        factors = self.native.rotation(positions, waves.frequencies, waves.amplitude)
        return torch.view_as_complex(factors.view(len(factors), 1, -1, 2))

    def cap(self, x: Tensor, limit: float) -> Tensor:
        return self.native.cap(x, limit)

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return self.native.add_positions(x, positions, table)
