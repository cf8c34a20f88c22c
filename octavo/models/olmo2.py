"""OLMo 2: a Llama with its norms after attention and MLP, none before them, and one over all queries and one over all keys.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

import dataclasses
from typing import Any

from octavo.layers.context import BuildContext
from octavo.layers.norm import SplitRMSNorm
from octavo.layers.rope import interleave
from octavo.models import llama
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
