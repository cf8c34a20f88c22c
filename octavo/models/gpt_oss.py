"""gpt-oss: attention sinks, a window on every other layer, biases everywhere, experts with a clamped gate, yarn."""

import dataclasses
from typing import Any

import torch

from octavo.layers.context import BuildContext
from octavo.layers.experts import narrow
from octavo.layers.moe import Routing, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.sharding import WeightSlot, WeightSlots, share
from octavo.models import llama, number, positive, sliding_layers
from octavo.models.mixtral import read_routing
from octavo.quants import Quants, Weight
from octavo.spec import ModelSpec
from octavo.weights.methods.base import Gate

# Defaults for keys that config.json may leave out.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "rope_theta": 150000.0,
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}
_WINDOW, _ALPHA, _LIMIT = 128, 1.702, 7.0


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    given = _DEFAULTS | {key: value for key, value in config.items() if value is not None}
    if "rope_parameters" not in given and "rope_scaling" not in given:
        given["rope_parameters"] = _ROPE
    return given


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _with_defaults(config)
    base = llama.spec(config)
    num_experts = routing(config).num_experts
    gate(config)
    return dataclasses.replace(
        base, family="gpt_oss", windows=windows(config, base.num_layers), has_sinks=True, num_experts=num_experts
    )


def windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer; 0: none. By default layers 0, 2, 4 … have one."""
    window = positive(config, "sliding_window", _WINDOW)
    return tuple(window * has_one for has_one in sliding_layers(config, num_layers, lambda index: index % 2 == 0))


def routing(config: dict[str, Any]) -> Routing:
    # Early config.json files have another name for the second key.
    key = "num_experts_per_tok" if config.get("num_experts_per_tok") is not None else "experts_per_token"
    return read_routing(config, "num_local_experts", key, True)


def gate(config: dict[str, Any]) -> Gate:
    return Gate(number(config, "swiglu_alpha", _ALPHA), number(config, "swiglu_limit", _LIMIT), 1.0)


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether the experts are stored as MXFP4."""
    quantised = config.get("quantization_config")
    return isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        num_heads = spec.num_heads // context.group.size
        sinks = torch.empty(num_heads, dtype=torch.float32, device=context.device)
        super().__init__(index, config, spec, context, window=spec.windows[index], sinks=sinks)
        self.sinks = sinks
        self.group = context.group
        self.num_heads = spec.num_heads
        self.is_mxfp4 = is_mxfp4(config)

    def make_mlp(
        self, index: int, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm | None, context: BuildContext
    ) -> SparseMLP:
        assert norm is not None
        mlp = SparseMLP(
            spec.hidden_size,
            spec.intermediate_size,
            routing(config),
            gate(config),
            norm,
            context,
            bias=True,
            packed_type="MXFP4" if is_mxfp4(config) else "",
        )
        mlp.experts.alternates = True
        return mlp

    def weight_slots(self, name: str) -> WeightSlots:
        def store(tensor: torch.Tensor) -> None:
            self.sinks.copy_(share(tensor, 0, self.group))

        return super().weight_slots(name) | {f"{name}.self_attn.sinks": WeightSlot((self.num_heads,), store)}

    def mlp_slots(self, name: str) -> WeightSlots:
        """All experts are in one tensor. Packed: rows as in a linear layer, one expert after the other. Otherwise: one
        transposed matrix per expert. Rows of gate and up alternate."""
        assert isinstance(self.mlp, SparseMLP)
        experts = self.mlp.experts
        count, hidden, inner = experts.num_experts, experts.hidden_size, experts.full_inner
        shapes = ((count, hidden, 2 * inner), (count, inner, hidden))
        if self.is_mxfp4:
            shapes = ((count * 2 * inner, hidden), (count * hidden, inner))  # type: ignore[assignment]
        place = f"{name}.mlp.experts"
        return self.mlp.router.weight_slots(f"{name}.mlp.router") | {
            f"{place}.gate_up_proj": WeightSlot(shapes[0], self._store_gate_up),
            f"{place}.down_proj": WeightSlot(shapes[1], self._store_down),
            f"{place}.gate_up_proj_bias": WeightSlot(
                (count, 2 * inner), lambda tensor: experts.fill_biases(tensor[:, 0::2], tensor[:, 1::2])
            ),
            f"{place}.down_proj_bias": WeightSlot((count, hidden), experts.fill_down_bias),
        }

    def _store_gate_up(self, tensor: Weight) -> None:
        assert isinstance(self.mlp, SparseMLP)
        experts = self.mlp.experts
        tensor = experts.alike(tensor)
        for expert in experts.held:
            rows = self._rows(tensor, expert, 2 * experts.full_inner)
            for part in range(2):
                experts.fill_gate_up(expert, part, _every_second(rows, part))

    def _store_down(self, tensor: Weight) -> None:
        assert isinstance(self.mlp, SparseMLP)
        experts = self.mlp.experts
        tensor = experts.alike(tensor)
        for expert in experts.held:
            experts.fill_down(expert, self._rows(tensor, expert, experts.hidden_size))

    def _rows(self, tensor: Weight, expert: int, num_rows: int) -> Weight:
        """One expert's weight [rows, columns], in the layout of a linear layer."""
        if not self.is_mxfp4:
            assert isinstance(tensor, torch.Tensor)
            return tensor[expert].t()
        return narrow(tensor, expert * num_rows, num_rows)


def _every_second(rows: Weight, first: int) -> Weight:
    if isinstance(rows, Quants):
        return Quants(rows.type, rows.rows[first::2])
    return rows[first::2]


class Model(llama.Model):
    layer_type = Layer
    expert_widths = ("intermediate_size",)

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(_with_defaults(config), spec, context)
