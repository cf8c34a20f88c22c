"""Mixtral: a Llama with routed experts for its MLP and an optional window on all layers."""

import dataclasses
from typing import Any

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.moe import Routing, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.sharding import WeightSlots
from octavo.models import llama, positive
from octavo.spec import ModelSpec
from octavo.weights.methods.base import Gate

_THETA, _EPSILON, _CONTEXT = 1e6, 1e-5, 131072  # defaults for config.json


def spec(config: dict[str, Any]) -> ModelSpec:
    base = llama.spec(config | {"max_position_embeddings": positive(config, "max_position_embeddings", _CONTEXT)})
    num_experts = routing(config).num_experts
    window = 0 if config.get("sliding_window") is None else positive(config, "sliding_window")
    windows = (window,) * base.num_layers if window else ()
    return dataclasses.replace(base, family="mixtral", windows=windows, num_experts=num_experts)


def routing(config: dict[str, Any]) -> Routing:
    return read_routing(config, "num_local_experts", "num_experts_per_tok", True)


def read_routing(config: dict[str, Any], num_experts: str, num_chosen: str, is_normalised: bool) -> Routing:
    """Read the routing from these two keys and check it. Only silu is accepted, which the experts' kernels implement."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {str(config['hidden_act'])[:40]!r}: experts are supported with silu only")
    routing = Routing(positive(config, num_experts), positive(config, num_chosen), is_normalised)
    if routing.num_chosen > routing.num_experts:
        raise ConfigError(
            f"{num_chosen} is {routing.num_chosen}, more than {num_experts}, {routing.num_experts}: correct whichever is wrong"
        )
    return routing


class Layer(llama.Layer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, config, spec, context, window=spec.windows[index] if spec.windows else 0)

    def make_mlp(
        self, index: int, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm | None, context: BuildContext
    ) -> SparseMLP:
        assert norm is not None
        return SparseMLP(spec.hidden_size, spec.intermediate_size, routing(config), Gate(), norm, context)

    def mlp_slots(self, name: str) -> WeightSlots:
        assert isinstance(self.mlp, SparseMLP)
        slots = self.mlp.router.weight_slots(f"{name}.block_sparse_moe.gate")
        for index in range(self.mlp.routing.num_experts):
            expert = f"{name}.block_sparse_moe.experts.{index}"
            slots |= self.mlp.experts.weight_slots(index, f"{expert}.w1", f"{expert}.w3", f"{expert}.w2")
        return slots


class Model(llama.Model):
    layer_type = Layer
    expert_widths = ("intermediate_size",)

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        given = {key: value for key, value in config.items() if value is not None}
        super().__init__({"rope_theta": _THETA, "rms_norm_eps": _EPSILON} | given, spec, context)
