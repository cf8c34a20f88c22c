"""Granite: a Llama with multipliers in config.json for embeddings, scores, residual additions and logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import llama, number
from octavo.spec import ModelSpec

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def spec(config: dict[str, Any]) -> ModelSpec:
    for key in _MULTIPLIERS:
        _above_zero(config, key)
    return dataclasses.replace(llama.spec(config), family="granite")


def _above_zero(config: dict[str, Any], key: str) -> float:
    value = number(config, key, 1.0)
    if not value:
        raise ConfigError(f"{key} is {value}: it must be a number above 0")
    return value


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, config, spec, context, scale=_above_zero(config, "attention_multiplier"))


class Model(llama.Model):
    """A Granite layer computes x + m · f(norm(x)). Here x / m is kept instead, from the embedding on, so that nothing has to
    be multiplied: x / m + f(norm(x)). norm(x / m) equals norm(x) if epsilon is divided by m², and after the last norm the
    factor is gone."""

    layer_type = Layer

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        multiplier = _above_zero(config, "residual_multiplier")
        super().__init__(
            config | {"rms_norm_eps": llama.epsilon(config) / multiplier**2},
            spec,
            context,
            embedding_factor=_above_zero(config, "embedding_multiplier") / multiplier,
            logits_factor=1.0 / _above_zero(config, "logits_scaling"),
        )


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_name = llama.gguf_name
gguf_fix = llama.gguf_fix


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    config = llama.gguf_config(metadata, tensors, "granite")
    return config | {
        "embedding_multiplier": number(metadata, "granite.embedding_scale", 1.0),
        "attention_multiplier": number(metadata, "granite.attention.scale", config["head_dim"] ** -0.5),
        "residual_multiplier": number(metadata, "granite.residual_scale", 1.0),
        "logits_scaling": number(metadata, "granite.logit_scale", 1.0),
    }
