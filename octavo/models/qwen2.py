"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, and an optional window on the later layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.layers.context import BuildContext
from octavo.layers.rope import rope_settings
from octavo.models import llama, number, positive, sliding_layers
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_WINDOW = 4096  # if config.json sets use_sliding_window without a size; null means no window


def spec(config: dict[str, Any]) -> ModelSpec:
    base = llama.spec(config | {"max_position_embeddings": positive(config, "max_position_embeddings", 32768)})
    return dataclasses.replace(
        base,
        family="qwen2",
        context_len=max(base.context_len, _stretched(config)),
        windows=tuple(windows(config, base.num_layers)),
    )


def _stretched(config: dict[str, Any]) -> int:
    """The context length with yarn; 0 without it. Qwen's instructions for long contexts add yarn to config.json and leave
    max_position_embeddings as it is."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope_settings(config)["rope_type"] != "yarn":
        return 0
    return int(number(rope, "factor", 1.0) * number(rope, "original_max_position_embeddings", 0.0))


def windows(config: dict[str, Any], num_layers: int) -> list[int]:
    """The window of each layer; 0: none."""
    if not config.get("use_sliding_window") or config.get("sliding_window", _WINDOW) is None:
        return [0] * num_layers
    window = positive(config, "sliding_window", _WINDOW)
    first = number(config, "max_window_layers", 28)
    return [window * has_window for has_window in sliding_layers(config, num_layers, lambda index: index >= first)]


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        # The family determines which products have biases: config.json does not say so and cannot change it.
        config = config | {"attention_bias": True, "mlp_bias": False}
        window = windows(config, spec.num_layers)[index]
        super().__init__(index, config, spec, context, window=window, output_bias=False)


class Model(llama.Model):
    layer_type = Layer


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    return llama.gguf_config(metadata, tensors, "qwen2")


GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_name = llama.gguf_name


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: unlike a Llama's, the rows of q and k are in the checkpoint's order."""
    return tensor
