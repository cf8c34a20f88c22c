"""Mistral: a Llama without biases and with a window on every layer, unless config.json has null for it.

Its GGUF files have the architecture llama and no window: they are read as Llama."""

import dataclasses
from typing import Any

from octavo.layers.context import BuildContext
from octavo.models import llama, positive
from octavo.spec import ModelSpec

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def spec(config: dict[str, Any]) -> ModelSpec:
    base = llama.spec(_DEFAULTS | config)
    return dataclasses.replace(base, family="mistral", windows=(_window(config, base),) * base.num_layers)


def _window(config: dict[str, Any], spec: ModelSpec) -> int:
    """The window; 0: none, or no sequence is longer than it."""
    config = _DEFAULTS | config
    if config["sliding_window"] is None:
        return 0
    window = positive(config, "sliding_window")
    return window if window < max(spec.context_len, spec.longest_len) else 0


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        # The family has no biases: config.json does not say so and cannot change it.
        config = config | {"attention_bias": False, "mlp_bias": False}
        super().__init__(index, config, spec, context, window=spec.windows[index])


class Model(llama.Model):
    layer_type = Layer

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(_DEFAULTS | config, spec, context)
