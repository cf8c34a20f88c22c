"""Gemma 1: a Llama with scaled embeddings, norm weights around 0, and a gelu in its MLP."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import llama
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

# Defaults for keys that config.json may leave out.
_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GELU = "gelu_pytorch_tanh"


def spec(config: dict[str, Any]) -> ModelSpec:
    return base_spec(_DEFAULTS | config, "gemma")


def base_spec(config: dict[str, Any], family: str) -> ModelSpec:
    """The part of the spec that all generations share."""
    if config.get("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is set: a model with bidirectional attention cannot generate text"
        )
    return dataclasses.replace(llama.spec(config), family=family)


class Layer(llama.Layer):
    norm_offset = 1.0

    def __init__(
        self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext, **traits: Any
    ) -> None:
        act = config.get("hidden_activation")
        if act is None:  # the first config.json files use hidden_act, where gelu means the tanh form
            act = _GELU if config.get("hidden_act") in (None, "gelu") else config["hidden_act"]
        config = config | {"hidden_act": act, "mlp_bias": False}
        super().__init__(index, config, spec, context, **traits)


class Model(llama.Model):
    layer_type: type[llama.Layer] = Layer
    defaults: Mapping[str, Any] = _DEFAULTS

    def __init__(
        self, config: dict[str, Any], spec: ModelSpec, context: BuildContext, *, logits_softcap: float = 0.0
    ) -> None:
        # Rounded to the model's dtype, as in training.
        factor = torch.tensor(math.sqrt(spec.hidden_size), dtype=context.dtype).item()
        config = {**self.defaults, **config}
        super().__init__(config, spec, context, embedding_factor=factor, logits_softcap=logits_softcap)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_name = llama.gguf_name


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    return llama.gguf_config(metadata, tensors, "gemma") | {"hidden_act": _GELU}


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Undo the converter's change: it adds 1 to the norms' weights."""
    return tensor - 1 if name.endswith("norm.weight") and isinstance(tensor, torch.Tensor) else tensor
