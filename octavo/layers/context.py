"""BuildContext: what a layer must know of its surroundings when it is built."""

import dataclasses
from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionBackend
from octavo.kernels.device_ops import DeviceOps
from octavo.parallel import Group
from octavo.stage import WHOLE, Stage
from octavo.weights.methods.registry import Methods


@dataclass(frozen=True, slots=True)
class BuildContext:
    group: Group
    attention: AttentionBackend
    methods: Methods  # how weights are held and multiplied
    max_len: int = 0  # tokens that a request can have at most; 0: as many as the model was trained for
    stage: Stage = WHOLE  # the layers that this rank computes
    splits_experts: bool = False  # ranks divide the experts among them, instead of each expert's inner width

    @property
    def alone(self) -> "BuildContext":
        """The context of a rank that has no others, for what every rank holds whole."""
        return dataclasses.replace(self, group=Group.single())

    @property
    def ops(self) -> DeviceOps:
        """What is computed between products."""
        return self.methods.settings.ops

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, and of small weights such as norms and biases."""
        return self.methods.settings.dtype

    @property
    def device(self) -> torch.device:
        return self.methods.settings.device

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for a parameter of this rank."""
        return self.methods.settings.empty(*shape)
