"""OLMo 2: a Llama with its norms after attention and MLP, none before them, and one over all queries and one over all keys.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

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

GGUF_ROWS_STAY_WHOLE = True  # by gguf_fix: a weight need not be decoded for it
_GGUF_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """An HF-style config from a GGUF file's metadata; `tensors`, its directory, tells what the metadata leaves out."""
    return llama.gguf_config(metadata, tensors, "olmo2")


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not need it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is not None and match[2] in _GGUF_NORMS:
        return f"model.layers.{match[1]}.{_GGUF_NORMS[match[2]]}.weight"
    return llama.gguf_name(name)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Nothing to undo: unlike a Llama's, the rows of q and k stand as in the checkpoint."""
    return tensor
