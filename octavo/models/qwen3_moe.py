"""Qwen3-MoE: a Qwen3 with experts instead of the MLP in all or most layers."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.moe import Routing, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.sharding import WeightSlots
from octavo.models import llama, positive, qwen3
from octavo.models.mixtral import read_routing
from octavo.spec import ModelSpec
from octavo.weights.methods.base import Gate

_STACKED = "octavo_stacked_experts"  # our own key, for GGUF files: all experts' rows are one matrix


def spec(config: dict[str, Any]) -> ModelSpec:
    base = qwen3.spec(_as_qwen3(config))
    num_experts = routing(config).num_experts
    has_experts(config, base.num_layers)
    positive(config, "moe_intermediate_size")
    return dataclasses.replace(base, family="qwen3_moe", num_experts=num_experts)


def _as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a window on all layers or none: this family ignores layer_types."""
    types = None
    if config.get("use_sliding_window"):
        types = ["sliding_attention"] * positive(config, "num_hidden_layers")
    return config | {"layer_types": types}


def routing(config: dict[str, Any]) -> Routing:
    key = (
        "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    )  # the older name, then the newer
    return read_routing(config, key, "num_experts_per_tok", bool(config.get("norm_topk_prob", False)))


def has_experts(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, except those in mlp_only_layers."""
    step = positive(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < num_layers for index in dense):
        raise ConfigError(f"mlp_only_layers must be a list of layers, whole numbers from 0 to {num_layers - 1}")
    return [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]


class Layer(qwen3.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, _as_qwen3(config), spec, context)
        self.is_stacked = bool(config.get(_STACKED))

    def make_mlp(
        self, index: int, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm | None, context: BuildContext
    ) -> Any:
        if not has_experts(config, spec.num_layers)[index]:
            return super().make_mlp(index, config, spec, norm, context)
        assert norm is not None
        inner_size = positive(config, "moe_intermediate_size")
        return SparseMLP(spec.hidden_size, inner_size, routing(config), Gate(), norm, context)

    def mlp_slots(self, name: str) -> WeightSlots:
        if not isinstance(self.mlp, SparseMLP):
            return super().mlp_slots(name)
        slots = self.mlp.router.weight_slots(f"{name}.mlp.gate")
        if self.is_stacked:
            parts = (f"{name}.mlp.experts.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
            return slots | self.mlp.experts.stack_slots(*parts)
        for index in range(self.mlp.routing.num_experts):
            expert = f"{name}.mlp.experts.{index}"
            slots |= self.mlp.experts.weight_slots(
                index, f"{expert}.gate_proj", f"{expert}.up_proj", f"{expert}.down_proj"
            )
        return slots


class Model(llama.Model):
    layer_type = Layer
    expert_widths = ("moe_intermediate_size",)

    def shares(self, config: dict[str, Any], spec: ModelSpec) -> dict[str, int]:
        shares = super().shares(config, spec)
        kinds = has_experts(config, spec.num_layers)
        if all(kinds):
            del shares["intermediate_size"]  # no layer uses it
        if any(kinds):
            shares["moe_intermediate_size"] = positive(config, "moe_intermediate_size")
        return shares


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_EXPERTS = {
    "ffn_gate_inp": "gate",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    # Without the keys that a dense Llama refuses.
    dense = {key: value for key, value in metadata.items() if not key.startswith("qwen3moe.expert_")}
    base = llama.gguf_config(dense, tensors, "qwen3moe")
    layers = range(positive(base, "num_hidden_layers"))
    return base | {
        "model_type": "qwen3_moe",
        "num_experts": positive(metadata, "qwen3moe.expert_count"),
        "num_experts_per_tok": positive(metadata, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": positive(metadata, "qwen3moe.expert_feed_forward_length"),
        # The converter supports no models with other values.
        "norm_topk_prob": True,
        "mlp_only_layers": [index for index in layers if f"blk.{index}.ffn_gate_inp.weight" not in tensors],
        _STACKED: True,
    }


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is not None and match[2] in _GGUF_EXPERTS:
        return f"model.layers.{match[1]}.mlp.{_GGUF_EXPERTS[match[2]]}.weight"
    return qwen3.gguf_name(name)


gguf_fix = qwen3.gguf_fix
