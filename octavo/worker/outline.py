"""Outline: a whole model with shapes and no weights, from which a rank learns what its layers cost and which tensors belong to other
stages."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from octavo.kernels.torch_ops import torch_ops
from octavo.layers.context import BuildContext
from octavo.layers.model import DecoderModel
from octavo.layers.sharding import WeightSlots
from octavo.models import load_family
from octavo.parallel import Group
from octavo.spec import ModelSpec
from octavo.stage import WHOLE, even_split, split
from octavo.weights.formats.checkpoint import Checkpoint
from octavo.weights.methods.registry import Methods

_META = torch.device("meta")  # tensors with a shape and no data
# The step for which costs are counted: as in decoding, every weight is read once, and for each row the keys and values of its context.
_ROWS, _CONTEXT = 8, 512
_MOST_COUNTED = 1000  # layers; more are divided evenly


def outline_of(checkpoint: Checkpoint, spec: ModelSpec, context: BuildContext) -> DecoderModel:
    """The model of this context, with shapes and no weights."""
    rank = context.methods.settings
    # Kernels hold weights in their own layouts, which need the data; slots and their shapes are the same with torch.
    outline = dataclasses.replace(
        rank, device=_META, ops=torch_ops(_META, rank.dtype), quantization="", has_triton=False, around=None
    )
    family = load_family(checkpoint.config["model_type"])
    model: DecoderModel = family.Model(
        checkpoint.config, spec, dataclasses.replace(context, methods=Methods(outline, rank))
    )
    return model


def whole_outline(checkpoint: Checkpoint, spec: ModelSpec, context: BuildContext) -> DecoderModel:
    """The model as one rank would have it, with shapes and no weights."""
    return outline_of(
        checkpoint, spec, dataclasses.replace(context, group=Group.single(), stage=WHOLE, splits_experts=False)
    )


@dataclass(frozen=True, slots=True)
class Outline:
    spec: ModelSpec
    slots: dict[str, int]  # tensor of the checkpoint → its numbers
    layers: list[set[str]]  # tensors of each layer

    @classmethod
    def of(cls, checkpoint: Checkpoint, spec: ModelSpec, context: BuildContext) -> "Outline":
        model = whole_outline(checkpoint, spec, context)
        slots = _sizes(model.weight_slots())
        layers = [set(layer.weight_slots("").keys()) for layer in model.layers]  # type: ignore[operator]
        prefix = "" if not layers else _prefix(slots, next(iter(layers[0])))
        return cls(spec, slots, [{f"{prefix}{index}{name}" for name in names} for index, names in enumerate(layers)])

    def without(self, model: DecoderModel) -> frozenset[str]:
        """The tensors that only other stages take."""
        return frozenset(self.slots.keys() - model.weight_slots().keys())

    def share_of(self, model: DecoderModel) -> float:
        """The part of all weights that a stage has."""
        return sum(_sizes(model.weight_slots()).values()) / sum(self.slots.values())

    def split(self, count: int) -> list[int]:
        """Where each stage begins, by what is read in a step: weights, and keys and values of the context. Of the embedding only a row
        is read for each token, of the head all."""
        spec = self.spec
        if spec.num_layers > _MOST_COUNTED:
            return even_split(count, spec.num_layers)
        kv = spec.kv_bytes_per_token(1) / spec.num_layers  # numbers of one layer
        windows = spec.windows or (0,) * spec.num_layers
        costs = [
            sum(self.slots[name] for name in names) + kv * _ROWS * (min(window, _CONTEXT) if window else _CONTEXT)
            for names, window in zip(self.layers, windows, strict=True)
        ]
        return split(costs, _ROWS * spec.hidden_size, spec.vocab_size * spec.hidden_size, count)


def _sizes(slots: WeightSlots) -> dict[str, int]:
    return {name: math.prod(slot.shape) for name, slot in slots.items() if not slot.is_optional}


def _prefix(slots: dict[str, int], tail: str) -> str:
    """What stands before a layer's number in the names of its tensors. `tail`: what follows the number, for one tensor of layer 0."""
    return next(name for name in slots if name.endswith(f"0{tail}")).removesuffix(f"0{tail}")
