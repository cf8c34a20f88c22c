"""OLMo 2: a Llama with norms after attention and MLP instead of before, a norm over all queries and one over all keys."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo.layers.context import BuildContext
from octavo.layers.norm import SplitRMSNorm
from octavo.layers.rope import interleave
from octavo.models import llama
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_DEFAULTS = {"rms_norm_eps": 1e-5}


def spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(llama.spec(config), family="olmo2")


class Layer(llama.Layer):
    norm_names = llama.NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")

    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        q_norm, k_norm = (
            SplitRMSNorm(
                num_heads * spec.head_size,
                llama.epsilon(config),
                context,
                lambda weight: interleave(weight, spec.head_size),
            )
            for num_heads in (spec.num_heads, spec.num_kv_heads)
        )
        super().__init__(index, config | {"mlp_bias": False}, spec, context, qk_norms=(q_norm, k_norm))


class Model(llama.Model):
    layer_type = Layer

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(_DEFAULTS | config, spec, context)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    return llama.gguf_config(metadata, tensors, "olmo2")


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is not None and match[2] in _GGUF_NORMS:
        return f"model.layers.{match[1]}.{_GGUF_NORMS[match[2]]}.weight"
    return llama.gguf_name(name)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: unlike a Llama's, the rows of q and k are in the checkpoint's order."""
    return tensor
