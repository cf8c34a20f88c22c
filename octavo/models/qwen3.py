"""Qwen3, the dense models: a Llama with normed query and key heads, and Qwen2's window."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo.layers.context import BuildContext
from octavo.models import llama, positive, qwen2
from octavo.quants import SameWeight
from octavo.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    # Unlike Llama, the default head size does not depend on the hidden size.
    head_size = positive(config, "head_dim", 128)
    return dataclasses.replace(qwen2.spec(config | {"head_dim": head_size}), family="qwen3")


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        window = qwen2.windows(config, spec.num_layers)[index]
        super().__init__(index, config, spec, context, window=window, has_head_norms=True)


class Model(llama.Model):
    layer_type = Layer


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    return llama.gguf_config(metadata, tensors, "qwen3")


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    match = re.fullmatch(r"blk\.(\d+)\.(attn_[qk]_norm)\.weight", name)
    if match is not None:
        return f"model.layers.{match[1]}.self_attn.{_GGUF_NORMS[match[2]]}.weight"
    return llama.gguf_name(name)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: unlike a Llama's, the rows of q and k are in the checkpoint's order."""
    return tensor
