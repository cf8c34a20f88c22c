"""Gemma 2: a Gemma with norms also after attention and MLP, soft caps for scores and logits, and a window on every other layer."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.models import gemma, llama, number, positive, sliding_layers
from octavo.spec import ModelSpec

# Defaults for keys that config.json may leave out.
_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _DEFAULTS | config
    base = gemma.base_spec(config, "gemma2")
    check_numbers(config)
    windows = windows_of(config, sliding_layers(config, base.num_layers, lambda index: index % 2 == 0))
    has_softcap = bool(number(config, "attn_logit_softcapping", 0.0))
    return dataclasses.replace(base, windows=windows, has_softcap=has_softcap)


def windows_of(config: dict[str, Any], is_sliding: list[bool]) -> tuple[int, ...]:
    window = 0 if config["sliding_window"] is None else positive(config, "sliding_window")
    return tuple(window * has_window for has_window in is_sliding)


def check_numbers(config: dict[str, Any]) -> None:
    scale(config)
    number(config, "final_logit_softcapping", 0.0)


def scale(config: dict[str, Any]) -> float:
    """The factor of attention scores."""
    divisor = number(config, "query_pre_attn_scalar", 256.0)
    if not divisor:
        raise ConfigError("query_pre_attn_scalar is 0: it must be a number above 0")
    return float(divisor**-0.5)


class Layer(gemma.Layer):
    norm_names = llama.NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )

    def __init__(
        self,
        index: int,
        config: dict[str, Any],
        spec: ModelSpec,
        context: BuildContext,
        *,
        has_head_norms: bool = False,
    ) -> None:
        super().__init__(
            index,
            config,
            spec,
            context,
            window=spec.windows[index],
            softcap=number(config, "attn_logit_softcapping", 0.0),
            scale=scale(config),
            has_head_norms=has_head_norms,
        )


class Model(gemma.Model):
    layer_type: type[llama.Layer] = Layer
    defaults: Mapping[str, Any] = _DEFAULTS

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        softcap = number({**self.defaults, **config}, "final_logit_softcapping", 0.0)
        super().__init__(config, spec, context, logits_softcap=softcap)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
gguf_fix = gemma.gguf_fix
_GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_LARGEST_NUM_LAYERS = 46  # of the 27B


def gguf_config(
    metadata: dict[str, Any],
    tensors: Mapping[str, object],
    architecture: str = "gemma2",
    largest_num_layers: int = _LARGEST_NUM_LAYERS,
) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks.
    The divisor of scores has no key: it is the head size, except for the largest model of a generation."""
    config = llama.gguf_config(metadata, tensors, architecture)
    divisor = config["head_dim"]
    if config["num_hidden_layers"] == largest_num_layers:
        divisor = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": divisor,
        "sliding_window": positive(metadata, f"{architecture}.attention.sliding_window", 4096),
        "attn_logit_softcapping": number(metadata, f"{architecture}.attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": number(metadata, f"{architecture}.final_logit_softcapping", 30.0) or None,
    }


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is not None and match[2] in _GGUF_NORMS:
        return f"model.layers.{match[1]}.{_GGUF_NORMS[match[2]]}.weight"
    return llama.gguf_name(name)
