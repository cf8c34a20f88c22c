"""DeviceOps by Triton kernels on a GPU. Imported by name where Triton is installed: elsewhere it may be missing."""

import torch
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights, Waves
from octavo.kernels.torch_ops import TorchOps
from octavo.kernels.triton.elementwise.activation import ACTIVATIONS, gate_mul
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.elementwise.rotation import rotation


class TritonOps(TorchOps):
    """A LayerNorm, a soft cap and learned positions are torch's."""

    kernels = "triton"

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        if norm.bias is not None:
            return super().norm(x, norm)
        return rms_norm(x, norm.weight, norm.epsilon, is_fixed=self.is_invariant, pdl=True)

    def rotation(self, positions: Tensor, waves: Waves) -> Tensor:
        factors = rotation(positions, waves.frequencies, waves.amplitude)
        return torch.view_as_complex(factors).unsqueeze(1)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation not in ACTIVATIONS:
            return super().gate(gate_up, activation)
        return gate_mul(gate_up, activation, pdl=True)


class InvariantTritonOps(TritonOps):
    """For --deterministic: sums over a row are in one order, however many rows there are."""

    is_invariant = True

    def norm_in_place(self, x: Tensor, norm: NormWeights) -> None:
        x.copy_(rms_norm(x, norm.weight, norm.epsilon, is_fixed=True))
