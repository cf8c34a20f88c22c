"""MTP heads: layers for multi-token prediction, which checkpoints such as DeepSeek-V3's have behind the model's own layers.

As published: h' = eh_proj [enorm(embedding of the token); hnorm(h)], a decoder layer, and the model's head behind a norm of its own. h is what
the model's head multiplies at the position before, or, where the model has not been yet, the layer's output there."""

import dataclasses
from typing import Any

import torch

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear
from octavo.layers.model import CausalModel, DecoderLayer
from octavo.layers.norm import RMSNorm
from octavo.layers.sharding import WeightSlots
from octavo.models import llama, load_family
from octavo.models.draft_heads.base import DraftHead, added, halves
from octavo.spec import ModelSpec


def spec(config: dict[str, Any], target: ModelSpec) -> ModelSpec:
    """Raises ConfigError for a model without such layers."""
    count = config.get("num_nextn_predict_layers")
    if not hasattr(load_family(target.family).Model, "prediction_layer") or not count:
        raise ConfigError(
            f"this {target.family} model has no layers for multi-token prediction (num_nextn_predict_layers): "
            "use ngram, suffix or draft_model"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"num_nextn_predict_layers is {str(count)[:40]!r}: it must be a whole number")
    return dataclasses.replace(target, num_layers=1)


def prefix(target: ModelSpec) -> str:
    """What the names of the first such layer's tensors begin with."""
    return f"model.layers.{target.num_layers}."


class Model(DraftHead):
    """The first of the layers for prediction. Further tokens are drafted by the same layer."""

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext, target: CausalModel) -> None:
        layer: DecoderLayer = load_family(spec.family).Model.prediction_layer(config, spec, context)
        super().__init__(spec, context, [layer], target)
        size, epsilon = spec.hidden_size, llama.epsilon(config)
        self.token_norm, self.feature_norm, self.norm = (RMSNorm(size, epsilon, context) for _ in range(3))
        self.token_part, self.feature_part = (ColumnLinear(size, (size,), context.alone) for _ in range(2))
        self._name = f"model.layers.{target.num_layers}"

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        assert hidden is not None, "a head needs features"
        self.attention_backend.plan(batch)
        (rotation,) = self.rotations(batch.positions)
        x = self.token_part(self.embed(batch), self.token_norm)
        x = added(self.feature_part, self.feature_norm(hidden), x)
        (layer,) = self.layers
        out: torch.Tensor = layer(x, batch, rotation)
        return out

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor | None]:
        rope = self.target.rope
        return [None if rope is None else rope.rotation(positions)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.target.head
        assert head is not None
        logits: torch.Tensor = head(hidden, self.norm)
        return logits

    def make_tap(self) -> "LastStateTap":
        return LastStateTap(self.target)

    def weight_slots(self) -> WeightSlots:
        name = self._name
        slots = self.token_norm.weight_slots(f"{name}.enorm") | self.feature_norm.weight_slots(f"{name}.hnorm")
        slots |= halves(*(part.weight_slots(f"{name}.eh_proj") for part in (self.token_part, self.feature_part)))
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return slots | layer.weight_slots(name) | self.norm.weight_slots(f"{name}.shared_head.norm")

    def is_ignored(self, name: str) -> bool:
        # The embedding and the head are the model's: some checkpoints have them once more.
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        is_copy = name in [f"{self._name}.{copy}" for copy in copies]
        return is_copy or not name.startswith(f"{self._name}.") or name.endswith("rotary_emb.inv_freq")


class LastStateTap:
    """What the model's head multiplies."""

    def __init__(self, target: CausalModel) -> None:
        self.layers = frozenset({target.num_layers})
        self.features: torch.Tensor | None = None
        self._target = target

    def take(self, layer: int, x: torch.Tensor) -> None:
        self.features = self._target.final(x)
