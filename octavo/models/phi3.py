"""Phi-3 and Phi-4: a Llama whose checkpoints fuse q, k and v, and gate and up, with separate rope factors for short and long
contexts, and in some models a partial rotation."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.rope import frequencies, rope_settings, rotated_size
from octavo.layers.sharding import WeightSlot, WeightSlots
from octavo.models import llama, number, positive
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_KINDS = ("default", "longrope")
_OLD_NAMES = ("su", "yarn")  # what the first config.json files call longrope


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _DEFAULTS | config
    llama.check_rope(config)
    base = llama.spec(_without_rope(config))
    settings = settings_of(config)
    if settings["rope_type"] not in _KINDS:
        raise ConfigError(f"rope type {settings['rope_type']!r} is not supported here; {' and '.join(_KINDS)} are")
    frequencies(settings, rotated_size(settings, base.head_size))  # checks the factors here, where errors name the file
    return dataclasses.replace(base, family="phi3", windows=(_window(config, base),) * base.num_layers)


def _without_rope(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None}


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if rope.get("rope_type", rope.get("type")) in _OLD_NAMES:
        rope["rope_type"] = "longrope"
    return rope_settings(config | {"rope_parameters": rope}, can_be_partial=True)


def _window(config: dict[str, Any], spec: ModelSpec) -> int:
    """The window; 0: none, or no sequence is longer than it."""
    if config.get("sliding_window") is None:
        return 0
    window = positive(config, "sliding_window")
    return window if window < spec.context_len else 0


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        # The family has no biases: config.json cannot change it.
        config = config | {"attention_bias": False, "mlp_bias": False}
        super().__init__(index, config, spec, context, window=spec.windows[index])
        self.rotated = rotated_size(settings_of(config), spec.head_size)

    def qkv_slots(self, name: str) -> WeightSlots:
        return self.attention.qkv.fused_slots(
            f"{name}.qkv_proj", lambda part, rows: rows if part == 2 else self.interleaved(rows)
        )

    def mlp_slots(self, name: str) -> WeightSlots:
        assert isinstance(self.mlp, GatedMLP)
        return self.mlp.gate_up.fused_slots(f"{name}.mlp.gate_up_proj") | self.mlp.down.weight_slots(
            f"{name}.mlp.down_proj"
        )


class Model(llama.Model):
    layer_type = Layer

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(_DEFAULTS | config, spec, context)
        settings = settings_of(_DEFAULTS | config)
        self._num_pairs = rotated_size(settings, spec.head_size) // 2
        self._is_long = (context.max_len or spec.context_len) > (settings["original_max_position_embeddings"] or 0)

    def rope_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return settings_of(config)

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        for name, is_used in ((_LONG_FACTORS, self._is_long), (_SHORT_FACTORS, not self._is_long)):
            store = self._divide_frequencies if is_used else _leave
            slots[name] = WeightSlot((self._num_pairs,), store, is_optional=True)
        return slots

    def _divide_frequencies(self, factors: torch.Tensor) -> None:
        self.rope.divide_frequencies(torch.cat((factors, factors.new_ones(len(self.rope.frequencies) - len(factors)))))


def _leave(factors: torch.Tensor) -> None:
    """Ignore the factors for the other context length."""


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_LONG_FACTORS, _SHORT_FACTORS = "model.rope_long_factors", "model.rope_short_factors"  # our names: only GGUF has them
_GGUF_NAMES = {"rope_factors_long.weight": _LONG_FACTORS, "rope_factors_short.weight": _SHORT_FACTORS}
_GGUF_LAYER_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    config = llama.gguf_config(metadata, tensors, "phi3")
    rope = config["rope_parameters"]
    num_rotated = positive(metadata, "phi3.rope.dimension_count", config["head_dim"])
    rope["partial_rotary_factor"] = num_rotated / config["head_dim"]
    rope["original_max_position_embeddings"] = positive(
        metadata, "phi3.rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if "rope_factors_long.weight" in tensors:
        ones = [1.0] * (num_rotated // 2)  # the factors that divide the frequencies come with the weights
        rope |= {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
        rope["attention_factor"] = number(metadata, "phi3.rope.scaling.attn_factor", 0.0) or None
    window = number(metadata, "phi3.attention.sliding_window", 0.0)
    return config | {"rope_parameters": rope, "sliding_window": int(window) or None}


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is not None and match[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{match[1]}.{_GGUF_LAYER_NAMES[match[2]]}.weight"
    return llama.gguf_name(name)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: unlike a Llama's, the rows of q and k are in the checkpoint's order."""
    return tensor
