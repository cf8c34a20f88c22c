"""The dense Qwen3 family: a Llama whose query and key heads are normed, with a window over the later layers where asked for.
Knows nothing of ranks, pages or files: layers, the attention backend and weights/ do."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from octavo.attention.turn import HeadNorms
from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.rope import interleave, rope_settings
from octavo.layers.sharding import Slot, Slots
from octavo.models import llama, number, positive
from octavo.spec import ModelSpec

# What a config.json may leave out, where it is not what a Llama's means by that.
_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def spec(config: dict[str, Any]) -> ModelSpec:
    said = {key: value for key, value in config.items() if value is not None}
    plain = llama.spec(_DEFAULTS | said)
    return dataclasses.replace(
        plain,
        family="qwen3",
        context_len=max(plain.context_len, _stretched(config)),
        has_window=any(_windows(config, plain.num_layers)),
    )


def _stretched(config: dict[str, Any]) -> int:
    """Qwen's advice for long contexts is to add yarn to config.json, which leaves max_position_embeddings as it was."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope_settings(config)["rope_type"] != "yarn":
        return 0
    return int(number(rope, "factor", 1.0) * number(rope, "original_max_position_embeddings", 0.0))


def _windows(config: dict[str, Any], num_layers: int) -> list[int]:
    """How far back each layer sees; 0: to the start."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [0] * num_layers
    window = positive(config, "sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = number(config, "max_window_layers", 28)
        return [window if index >= first else 0 for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ConfigError(f"layer_types must be a list of {num_layers} names, each {' or '.join(_LAYER_TYPES)}")
    return [window if kind == "sliding_attention" else 0 for kind in types]


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        # One weight for all heads, so every rank holds it whole.
        norms = HeadNorms(context.empty(spec.head_size), context.empty(spec.head_size), llama.epsilon(config))
        window = _windows(config, spec.num_layers)[index]
        super().__init__(index, config, spec, context, window=window, head_norms=norms)
        self.q_norm, self.k_norm = norms.q, norms.k

    def slots(self, name: str) -> Slots:
        return super().slots(name) | {
            f"{name}.self_attn.q_norm.weight": self._norm_slot(self.q_norm),
            f"{name}.self_attn.k_norm.weight": self._norm_slot(self.k_norm),
        }

    def _norm_slot(self, target: torch.Tensor) -> Slot:
        """In the order of the rows of q and k, which are interleaved."""

        def store(tensor: torch.Tensor) -> None:
            target.copy_(interleave(tensor, self.head_size))

        return Slot((self.head_size,), store)


class Model(llama.Model):
    layer_type = Layer


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

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


def gguf_fix(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Nothing to undo: unlike a Llama's, the rows of q and k stand as in the checkpoint."""
    return tensor
