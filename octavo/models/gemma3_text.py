"""Gemma 3, the text models: a Gemma 2 without soft caps, with normed query and key heads, and a window with a rope of its own
on five layers of six."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.rope import rope_settings
from octavo.models import gemma, gemma2, llama, number, positive, sliding_layers
from octavo.spec import ModelSpec

# Defaults for keys that config.json may leave out.
_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_PATTERN = 6  # by default, every sixth layer has no window
_THETA, _LOCAL_THETA = 1e6, 1e4
_FULL, _SLIDING = "full_attention", "sliding_attention"


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _DEFAULTS | config
    if config.get("attn_logit_softcapping") is not None:
        raise ConfigError("attn_logit_softcapping is set: Gemma 3 has no soft cap for scores, remove it")
    for kind in (_FULL, _SLIDING):
        llama.check_rope(rope_config(config, kind))
        rope_settings(rope_config(config, kind))
    base = gemma.base_spec(config | {"rope_parameters": None, "rope_scaling": None}, "gemma3_text")
    gemma2.check_numbers(config)
    return dataclasses.replace(base, windows=gemma2.windows_of(config, local_layers(config, base.num_layers)))


def local_layers(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers have a window and its separate rope."""
    pattern = positive(config, "sliding_window_pattern", _PATTERN)
    return sliding_layers(config, num_layers, lambda index: (index + 1) % pattern != 0)


def rope_config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rope configuration of one kind of layers, in the form that other families use for all. It is in rope_parameters
    under the kind or, before transformers 5, in rope_scaling for layers without a window."""
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope_parameters must be an object with {_FULL} and {_SLIDING}")
    is_full = kind == _FULL
    return {
        "rope_scaling": parameters.get(kind) or (config.get("rope_scaling") if is_full else None),
        "rope_theta": number(config, *(("rope_theta", _THETA) if is_full else ("rope_local_base_freq", _LOCAL_THETA))),
        "max_position_embeddings": config["max_position_embeddings"],
    }


class Layer(gemma2.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, config, spec, context, has_head_norms=True)


class Model(gemma2.Model):
    layer_type = Layer
    defaults = _DEFAULTS

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(config, spec, context)
        local = rope_settings(rope_config(_DEFAULTS | config, _SLIDING))
        self.local_rope = self.make_rope(local, spec, context)
        self._is_local = local_layers(config, spec.num_layers)

    def rope_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return rope_settings(rope_config(config, _FULL))

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor | None]:
        global_, local = self.rope.rotation(positions), self.local_rope.rotation(positions)
        return [local if self._is_local[index] else global_ for index in self.layer_numbers]


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_name = gemma2.gguf_name
gguf_fix = gemma.gguf_fix
_LARGEST_NUM_LAYERS = 62  # of the 27B


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    config = gemma2.gguf_config(metadata, tensors, "gemma3", _LARGEST_NUM_LAYERS)
    return config | {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": number(metadata, "gemma3.final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            _FULL: config["rope_parameters"] | {"rope_theta": number(metadata, "gemma3.rope.freq_base", _THETA)},
            _SLIDING: {"rope_theta": number(metadata, "gemma3.rope.freq_base_swa", _LOCAL_THETA)},
        },
    }
