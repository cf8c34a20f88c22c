"""The dense Qwen3 family: a Llama whose query and key heads are normed, with a window as Qwen2 has it.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo.layers.context import BuildContext
from octavo.models import llama, positive, qwen2
from octavo.quants import SameWeight
from octavo.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    # Unlike a Llama's, a head's size does not follow from the hidden size where config.json leaves it out.
    head_size = positive(config, "head_dim", 128)
    return dataclasses.replace(qwen2.spec(config | {"head_dim": head_size}), family="qwen3")


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        window = qwen2.windows(config, spec.num_layers)[index]
        super().__init__(index, config, spec, context, window=window, has_head_norms=True)


class Model(llama.Model):
    layer_type = Layer


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # by gguf_fix: a weight need not be decoded for it
_GGUF_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """An HF-style config from a GGUF file's metadata; `tensors`, its directory, tells what the metadata leaves out."""
    return llama.gguf_config(metadata, tensors, "qwen3")


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not need it."""
    match = re.fullmatch(r"blk\.(\d+)\.(attn_[qk]_norm)\.weight", name)
    if match is not None:
        return f"model.layers.{match[1]}.self_attn.{_GGUF_NORMS[match[2]]}.weight"
    return llama.gguf_name(name)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Nothing to undo: unlike a Llama's, the rows of q and k stand as in the checkpoint."""
    return tensor
