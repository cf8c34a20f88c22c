"""RankWeights: the weights of one rank: the bytes that they take, whether they fit, and loading them into the model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.config import AUTO, ModelConfig
from octavo.device import Device
from octavo.errors import ConfigError
from octavo.layers.linear import Linear
from octavo.layers.model import DecoderModel
from octavo.weights.formats.checkpoint import Checkpoint
from octavo.weights.formats.dummy import dummy_packing, dummy_tensors
from octavo.weights.methods.base import Use, WeightRequest
from octavo.weights.methods.registry import Methods
from octavo.weights.methods.torch_fp8 import check_fp8, saving
from octavo.worker.memory.page_count import decoded_weights, weights_too_large

_ROUNDED_BYTES = {"int8": 34 / 32, "int4": 20 / 32}  # for each weight, with its group's scale and minimum


@dataclass(frozen=True, slots=True)
class RankWeights:
    model: DecoderModel  # built, with memory for its weights
    config: ModelConfig
    dtype: torch.dtype  # of weights that are not packed
    device: Device
    num_ranks: int  # that share each of them
    methods: Methods  # which hold the model's weights
    elsewhere: frozenset[str] = frozenset()  # tensors that only ranks of other stages take
    stage_share: float = 1.0  # the part of all weights that this stage has

    @property
    def keeps_packed(self) -> bool:
        """Some weights arrive packed."""
        return bool(self.methods.settings.packed_types)

    def fill(self, checkpoint: Checkpoint, available: int) -> list[str]:
        """Load the weights. → notes for the start report."""
        self.check_fit(checkpoint, available)
        place = self.device.torch_device
        if self.config.load_format == "dummy":
            packing = dummy_packing(checkpoint.config, self.methods.settings.packed_types)
            tensors = dummy_tensors(self._shapes(with_others=False), place, self.dtype, packing=packing)
        else:
            # Unknown tensors are read: they are a mistake to be reported.
            others = self.elsewhere | {name for name, slot in self.model.weight_slots().items() if slot.is_elsewhere}
            tensors = checkpoint.tensors(
                place,
                self.dtype,
                keep_packed=self.keeps_packed,
                is_wanted=lambda name: self.model.hf_name(name) not in others,
            )
        self.model.load(tensors)
        if checkpoint.weights is None or not checkpoint.weights.packing_label:
            return []
        stored = int(checkpoint.num_bytes * self.stage_share) // self.num_ranks
        note = decoded_weights(self.model.weights_bytes, stored, checkpoint.weights.packing_label, self._dtype_name)
        return [note] if note else []

    def check_fit(self, checkpoint: Checkpoint, available: int) -> None:
        needed = self.needed(checkpoint)
        if needed > available:
            saving = self.offered_saving(self.dtype)
            held = "packed" if self.keeps_packed else f"as {self._dtype_name}"
            in_8_bits = needed - saving if saving else 0
            raise ConfigError(weights_too_large(needed, held, available, in_8_bits, self.in_bfloat16()))

    def needed(self, checkpoint: Checkpoint) -> int:
        """Bytes that this rank's weights will take, as they will be held."""
        num_bytes = self._num_bytes(self.dtype)
        match self.config.quantization:
            case "fp8":
                return num_bytes - fp8_saving(self.model, self.dtype)
            case "int8" | "int4" as how if self.device.is_cuda:
                return num_bytes - sum(rounded_saving(linear.request, self.dtype, how) for linear in self._linears())
            case "int8" | "int4":
                return int(num_bytes / self.dtype.itemsize * _ROUNDED_BYTES[self.config.quantization])
            case _:
                if self.keeps_packed and checkpoint.weights is not None:
                    held = checkpoint.weights.held_bytes(self.dtype.itemsize, self.methods.packings)
                    return min(num_bytes, int(held * self.stage_share) // self.num_ranks)
                return num_bytes

    def in_bfloat16(self) -> int:
        """Bytes that they would take with --dtype bfloat16; 0: no smaller than now, or not supported."""
        is_plain = not self.keeps_packed and self.config.quantization in (AUTO, "packed", "none")
        return self._num_bytes(torch.bfloat16) if is_plain and self.dtype == torch.float32 else 0

    def offered_saving(self, dtype: torch.dtype) -> int:
        """Bytes that --quantization fp8 would save; 0: already chosen, or not supported on this device."""
        if self.config.quantization == "fp8":
            return 0
        try:
            check_fp8(self.device.torch_device, dtype)
        except ConfigError:
            return 0
        return fp8_saving(self.model, self.dtype)

    def _linears(self) -> Iterator[Linear]:
        return (module for module in self.model.modules() if isinstance(module, Linear))

    def _num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of this rank's weights in that type."""
        return sum(map(math.prod, self._shapes().values())) * dtype.itemsize // self.num_ranks

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _shapes(self, with_others: bool = True) -> dict[str, tuple[int, ...]]:
        """By name. `with_others`: experts of other ranks, too, so that ranks have equal shares of all of them."""
        return {
            name: slot.shape
            for name, slot in self.model.weight_slots().items()
            if not slot.is_optional and (with_others or not slot.is_elsewhere)
        }


def rounded_saving(request: WeightRequest, dtype: torch.dtype, how: str) -> int:
    """Bytes by which a GPU's --quantization int8 or int4 makes a weight smaller than in `dtype`, at most."""
    if request.use is not Use.PRODUCT:
        return 0
    return int(request.out_features * request.in_features * (dtype.itemsize - _ROUNDED_BYTES[how]))


def fp8_saving(model: DecoderModel, dtype: torch.dtype) -> int:
    """Bytes that this rank's weights save in fp8 compared with `dtype`."""
    return sum(saving(module.request, dtype) for module in model.modules() if isinstance(module, Linear))
