"""EAGLE-3 heads: a decoder layer, or a few, over a feature made of three of the model's hidden states, with a vocabulary of its own.

Two formats are read: that of the package speculators, and that of the method's authors, which vLLM and SGLang read as well."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.embedding import Head
from octavo.layers.linear import ColumnLinear
from octavo.layers.model import CausalModel
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope, rope_settings
from octavo.layers.sharding import WeightSlot, WeightSlots, check_shares
from octavo.models import llama, positive
from octavo.models.draft_heads.base import DraftHead, added, halves
from octavo.parallel import Group
from octavo.spec import ModelSpec

_HEAD_NORMS = "qwen3"  # layers of this family normalise queries and keys
_LAYERS = "transformer_layer_config"
_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FROM_TRAINING = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A head's config.json in one form: that of its layers, with the head's own values beside them."""
    kind = config.get("speculators_model_type")
    if kind is None:
        if "draft_vocab_size" not in config:
            raise ConfigError("draft_vocab_size is missing: this is no EAGLE-3 head")
        inner, own = config, config | (config.get("eagle_config") or {})
    elif kind != "eagle3":
        raise ConfigError(f"speculators_model_type is {str(kind)[:40]!r}: it must be eagle3")
    else:
        if not isinstance(config.get(_LAYERS), dict):
            raise ConfigError(f"{_LAYERS} is missing: it must be the configuration of the head's layers")
        inner, own = config[_LAYERS], config
    family = inner.get("model_type", _HEAD_NORMS if kind else "llama")
    if family not in ("llama", _HEAD_NORMS):
        raise ConfigError(f"its layers are of the family {str(family)[:40]!r}: llama and {_HEAD_NORMS} are supported")
    kept = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *_OPTIONS)
    found = inner | {key: own[key] for key in kept if own.get(key) is not None} | {"model_type": family}
    for name in _OPTIONS:
        if not isinstance(found.setdefault(name, False), bool):
            raise ConfigError(f"{name} is {str(found[name])[:40]!r}: it must be true or false")
    if found["norm_before_fc"] and found["fc_norm"]:
        raise ConfigError("norm_before_fc and fc_norm are both true: a head has one of them")
    return found


def spec(config: dict[str, Any], target: ModelSpec) -> ModelSpec:
    """`config`: flat(). Raises ConfigError where the head is not one for this model."""
    found = llama.spec(config | {"num_hidden_layers": positive(config, "num_hidden_layers", 1)})
    size = positive(config, "target_hidden_size", found.hidden_size)
    if size != target.hidden_size:
        raise ConfigError(f"it takes hidden states of size {size}, and the model's have {target.hidden_size}")
    if found.vocab_size != target.vocab_size:
        raise ConfigError(
            f"it is for a vocabulary of {found.vocab_size:,} tokens, and the model's has {target.vocab_size:,}"
        )
    if positive(config, "draft_vocab_size") > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {config['draft_vocab_size']:,}, more than the {target.vocab_size:,} tokens of the model"
        )
    kinds = config.get("layer_types") or ()
    if "sliding_attention" in kinds or (config.get("use_sliding_window") and config.get("sliding_window")):
        raise ConfigError("its layers have a sliding window, which is not supported in a head")
    layers_of(config, target.num_layers)
    return found


def check_ranks(spec: ModelSpec, group: Group) -> None:
    """Raises ConfigError where the ranks do not divide the head's layers."""
    check_shares(group.size, **llama.shares(spec))


def layers_of(config: dict[str, Any], num_layers: int) -> list[int]:
    """The model's layers whose inputs make a feature, ascending; the number of layers stands for the last one's output."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(layers, list) and 0 < len(layers) <= 16 and all(type(layer) is int for layer in layers)
    if not is_list or len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids is {str(layers)[:60]}: it must be different numbers from 0 to {num_layers}, "
            "the model's number of layers"
        )
    return sorted(layers)


class FirstLayer(llama.Layer):
    """A layer whose queries, keys and values are made of two vectors: the token's embedding and the feature before it."""

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(0, config, spec, context, has_head_norms=config["model_type"] == _HEAD_NORMS)
        self.feature_norm = RMSNorm(spec.hidden_size, llama.epsilon(config), context)
        self.feature_qkv = ColumnLinear(spec.hidden_size, self.attention.qkv.part_sizes, context)
        self._adds_normed = bool(config["norm_before_residual"])

    def pair(self, embedded: torch.Tensor, feature: torch.Tensor, batch: Batch, rotation: Any) -> torch.Tensor:
        """[T, D] each → [T, D]; the feature may be changed."""
        normed = self.feature_norm(feature)
        qkv = added(self.feature_qkv, normed, self.attention.qkv(embedded, self.attention.norm))
        x = self.attention.attended(qkv, normed if self._adds_normed else feature, batch, rotation)
        out: torch.Tensor = self.mlp(x)
        return out

    def qkv_slots(self, name: str) -> WeightSlots:
        return halves(self.slots_of(self.attention.qkv, name), self.slots_of(self.feature_qkv, name))

    def weight_slots(self, name: str) -> WeightSlots:
        return super().weight_slots(name) | self.feature_norm.weight_slots(f"{name}.hidden_norm")


class Model(DraftHead):
    def __init__(
        self, config: dict[str, Any], spec: ModelSpec, context: BuildContext, target: CausalModel, has_embedding: bool
    ) -> None:
        """`config`: flat(). `has_embedding`: the checkpoint has one."""
        if not has_embedding and spec.hidden_size != target.hidden_size:
            raise ConfigError(
                f"embed_tokens.weight is missing: the model's embedding has {target.hidden_size} numbers, not {spec.hidden_size}"
            )
        super().__init__(spec, context, self._make_layers(config, spec, context), target, has_embedding)
        epsilon, draft_size = llama.epsilon(config), positive(config, "draft_vocab_size")
        self.tapped = layers_of(config, target.num_layers)
        width, count = target.hidden_size, len(self.tapped)
        # Norms of what makes a feature: of each hidden state, or of all side by side, which then are one product.
        self.input_norm = RMSNorm(count * width, epsilon, context) if config["norm_before_fc"] else None
        norms = [RMSNorm(width, epsilon, context) for _ in self.tapped] if config["fc_norm"] else []
        self.state_norms = nn.ModuleList(norms)
        inputs = [count * width] if self.input_norm is not None else [width] * count
        self.feature_parts = nn.ModuleList(ColumnLinear(size, (spec.hidden_size,), context.alone) for size in inputs)
        self.norm = RMSNorm(spec.hidden_size, epsilon, context)
        self.head = Head(spec.hidden_size, draft_size, context, is_tied=False)
        self.rope = Rope(rope_settings(config), spec.head_size, context.device, context.ops, context.max_len)
        self._feeds_normed = bool(config["norm_output"])
        self._vocab_size = spec.vocab_size
        self._has_map = draft_size < spec.vocab_size
        self.vocabulary = torch.arange(draft_size, device=context.device)

    def _make_layers(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> list[llama.Layer]:
        has_norms = config["model_type"] == _HEAD_NORMS
        others = [llama.Layer(i, config, spec, context, has_head_norms=has_norms) for i in range(1, spec.num_layers)]
        return [FirstLayer(config, spec, context), *others]

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        assert hidden is not None, "a head needs features"
        self.attention_backend.plan(batch)
        rotations = self.rotations(batch.positions)
        first, *others = self.layers
        assert isinstance(first, FirstLayer)
        x = first.pair(self.embed(batch), hidden, batch, rotations[0])
        for layer, rotation in zip(others, rotations[1:], strict=True):
            x = layer(x, batch, rotation)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden, self.norm)
        return logits

    def chained(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) if self._feeds_normed else hidden

    def make_tap(self) -> "Eagle3Tap":
        return Eagle3Tap(self, self.tapped)

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────

    def weight_slots(self) -> WeightSlots:
        slots = self.layer_slots("layers") | self.norm.weight_slots("norm") | self.head.weight_slots("lm_head")
        if self.embedding is not None:
            slots |= self.embedding.weight_slots("embed_tokens")
        slots["fc.weight"] = self._feature_slot()
        if self.input_norm is not None:
            slots |= self.input_norm.weight_slots("input_norm")
        for number, norm in enumerate(self.state_norms):
            assert isinstance(norm, RMSNorm)
            slots |= norm.weight_slots(f"fc_norm.{number}")
        assert self.vocabulary is not None
        slots["d2t"] = WeightSlot(tuple(self.vocabulary.shape), self._take_map, is_optional=not self._has_map)
        return slots

    def _feature_slot(self) -> WeightSlot:
        parts = [part for part in self.feature_parts if isinstance(part, ColumnLinear)]
        widths = [part.request.in_features for part in parts]

        def store(tensor: torch.Tensor) -> None:
            for part, columns in zip(parts, torch.split(tensor, widths, dim=1), strict=True):
                part.fill_weight(0, columns.contiguous())

        return WeightSlot((parts[0].part_sizes[0], sum(widths)), store)

    def _take_map(self, offsets: torch.Tensor) -> None:
        """`offsets`: by how much the model's number of each token is greater than the head's."""
        assert self.vocabulary is not None
        if offsets.is_meta:
            return
        if offsets.is_floating_point():
            raise ConfigError("the checkpoint's tensor d2t is not of whole numbers")
        tokens = self.vocabulary + offsets.to(self.vocabulary.device).long()
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise ConfigError(f"the checkpoint's tensor d2t leads to tokens beyond the model's {self._vocab_size:,}")
        if len(set(tokens.tolist())) < len(tokens):
            raise ConfigError("the checkpoint's tensor d2t leads to one token twice")
        self.vocabulary = tokens

    def hf_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    def is_ignored(self, name: str) -> bool:
        return name in _FROM_TRAINING or name.endswith("rotary_emb.inv_freq")


class Eagle3Tap:
    """Adds up products of hidden states as the model comes by them: together they are the product of all side by side."""

    def __init__(self, head: Model, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self.features: torch.Tensor | None = None
        self._order, self._head = {layer: place for place, layer in enumerate(layers)}, head
        self._states: list[torch.Tensor] = []

    def take(self, layer: int, x: torch.Tensor) -> None:
        head, place = self._head, self._order[layer]
        if head.input_norm is not None:
            self._states = [*([] if place == 0 else self._states), x.clone()]  # layers change it
            if len(self._states) == len(self._order):
                self.features = head.feature_parts[0](torch.cat(self._states, dim=1), head.input_norm)
            return
        part = head.feature_parts[place]
        assert isinstance(part, ColumnLinear)
        state = head.state_norms[place](x) if len(head.state_norms) else x
        if place == 0:
            self.features = part(state)
        else:
            assert self.features is not None
            self.features = added(part, state, self.features)
