"""The Qwen2 family, Qwen2.5 included: a Llama with biases on q, k and v, with a window over the later layers where asked for.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.layers.context import BuildContext
from octavo.layers.rope import rope_settings
from octavo.models import llama, number, positive, sliding_layers
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_WINDOW = 4096  # where config.json asks for one and does not say how wide; null says that there is none


def spec(config: dict[str, Any]) -> ModelSpec:
    plain = llama.spec(config | {"max_position_embeddings": positive(config, "max_position_embeddings", 32768)})
    return dataclasses.replace(
        plain,
        family="qwen2",
        context_len=max(plain.context_len, _stretched(config)),
        windows=tuple(windows(config, plain.num_layers)),
    )


def _stretched(config: dict[str, Any]) -> int:
    """Qwen's advice for long contexts is to add yarn to config.json, which leaves max_position_embeddings as it was."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope_settings(config)["rope_type"] != "yarn":
        return 0
    return int(number(rope, "factor", 1.0) * number(rope, "original_max_position_embeddings", 0.0))


def windows(config: dict[str, Any], num_layers: int) -> list[int]:
    """How far back each layer sees; 0: to the start."""
    if not config.get("use_sliding_window") or config.get("sliding_window", _WINDOW) is None:
        return [0] * num_layers
    window = positive(config, "sliding_window", _WINDOW)
    first = number(config, "max_window_layers", 28)
    return [window * has_window for has_window in sliding_layers(config, num_layers, lambda index: index >= first)]


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        # Where biases are is a fact of the family: no config.json says it, and none can change it.
        config = config | {"attention_bias": True, "mlp_bias": False}
        window = windows(config, spec.num_layers)[index]
        super().__init__(index, config, spec, context, window=window, output_bias=False)


class Model(llama.Model):
    layer_type = Layer


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """An HF-style config from a GGUF file's metadata; `tensors`, its directory, tells what the metadata leaves out."""
    return llama.gguf_config(metadata, tensors, "qwen2")


GGUF_ROWS_STAY_WHOLE = True  # by gguf_fix: a weight need not be decoded for it
gguf_name = llama.gguf_name


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Nothing to undo: unlike a Llama's, the rows of q and k stand as in the checkpoint."""
    return tensor
