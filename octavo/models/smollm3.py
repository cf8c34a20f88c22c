"""SmolLM3: a Llama with some layers that have no rotary positions; these may have a window."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import llama, positive, qwen2
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
_INTERVAL = 4  # by default, every fourth layer has no rope


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _DEFAULTS | config
    base = llama.spec(config)
    return dataclasses.replace(base, family="smollm3", windows=_windows(config, base.num_layers))


def rope_layers(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers have rope. Despite its name, config.json's no_rope_layers has 1 for those that do."""
    given = config.get("no_rope_layers")
    if given is None:
        interval = positive(config, "no_rope_layer_interval", _INTERVAL)
        return [bool((index + 1) % interval) for index in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        raise ConfigError(f"no_rope_layers must be a list of {num_layers} numbers, 1 for a layer with rope, 0 without")
    return [bool(flag) for flag in given[:num_layers]]


def _windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer. Without layer_types, layers without rope have the window, if there is one."""
    has_rope = rope_layers(config, num_layers)
    types = ["full_attention" if with_rope else "sliding_attention" for with_rope in has_rope]
    if config.get("layer_types") is None:
        config = config | {"layer_types": types}
    return tuple(qwen2.windows(config, num_layers))


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, config, spec, context, window=spec.windows[index])


class Model(llama.Model):
    layer_type = Layer

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(_DEFAULTS | config, spec, context)
        self._has_rope = rope_layers(config, spec.num_layers)

    def rotations(self, positions: torch.Tensor) -> Sequence[torch.Tensor | None]:
        rotation = self.rope.rotation(positions)
        return [rotation if self._has_rope[index] else None for index in self.layer_numbers]


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_name = llama.gguf_name


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks.
    No key has the layers without rope: it is every fourth."""
    return llama.gguf_config(metadata, tensors, "smollm3")


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """As for Llama: the converter also interleaves q and k of layers without rope."""
    return llama.gguf_fix(name, tensor, config)
