"""DeviceOps: what a model computes between its products, behind one interface for every device.

A layer asks for an operation and never for the device. There are four implementations: torch alone (torch_ops.py), the
native CPU kernels (cpu/device_ops.py), and Triton kernels, the usual ones and those of --deterministic (triton/device_ops.py)."""

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Activation = Literal["none", "silu", "gelu", "gelu_tanh", "relu"]
"""gelu: by erf; gelu_tanh: its approximation by tanh."""


class NormWeights(NamedTuple):
    """An RMSNorm, or a LayerNorm where it has a bias."""

    weight: Tensor  # [D]
    bias: Tensor | None
    epsilon: float


class Waves(NamedTuple):
    """The rotary frequencies of a head's pairs."""

    frequencies: Tensor  # [D/2] float32, radians per position; 0: the pair is not rotated
    amplitude: float  # what a rotated pair is multiplied by
    amplitudes: Tensor  # [1, D/2] float32: that, and 1 for pairs that are not rotated


class DeviceOps(Protocol):
    """Tensors are [T, …], one row per token, contiguous in the last dimension."""

    @property
    def kernels(self) -> Literal["torch", "native", "triton"]:
        """Whose they are. torch computes what the others have no kernel for."""
        ...

    @property
    def is_invariant(self) -> bool:
        """Triton's for --deterministic, in which the bits of a row do not depend on the other rows."""
        ...

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """[T, D] → [T, D], a new tensor."""
        ...

    def add_norm(self, x: Tensor, norm: NormWeights, residual: Tensor) -> Tensor:
        """residual + norm(x). The residual is changed and returned."""
        ...

    def norm_in_place(self, x: Tensor, norm: NormWeights) -> None:
        """An RMSNorm of x [T, D], which may be columns of a wider tensor and is changed."""
        ...

    def norm_factor(self, size: int) -> float:
        """What the weight of an RMSNorm is multiplied by when it is stored, for `norm` to be right."""
        ...

    def rotation(self, positions: Tensor, waves: Waves) -> Tensor:
        """[T] → [T, 1, D/2] complex: what each head is multiplied with."""
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2 I] → activation(first half) · second half, [T, I]. The input may be changed."""
        ...

    def cap(self, x: Tensor, limit: float) -> Tensor:
        """limit · tanh(x / limit). x is changed and returned."""
        ...

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """x [T, D] + rows of the table [*, D]. x is changed and returned."""
        ...
