"""DeepSeek-V2: latent attention, shared experts that process every token, and routed experts.

A page holds a token's latent as one KV head, and once more as its value: docs/decisions has the cost."""

import dataclasses
import math
import re
from typing import Any

import torch
from torch import nn

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.experts import Experts
from octavo.layers.latent_attention import LatentAttention, LatentSizes
from octavo.layers.mlp import GatedMLP
from octavo.layers.model import CausalModel, DecoderLayer, TensorNames
from octavo.layers.moe import Router, by_rows
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope, longest_len, rope_settings
from octavo.layers.sharding import WeightSlots, check_shares
from octavo.models import llama, number, positive, require_causal
from octavo.spec import ModelSpec
from octavo.weights.methods.base import Gate

_INNER_EPSILON = 1e-6  # of the latents' norms, whatever config.json has for the others
_NOT_CHOSEN = -1e30  # stands for log(0)
DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
_METHODS = ("greedy", "group_limited_greedy")


def spec(config: dict[str, Any]) -> ModelSpec:
    config = DEFAULTS | config
    if config["topk_method"] not in _METHODS:
        raise ConfigError(f"topk_method is {str(config['topk_method'])[:40]!r}: {' and '.join(_METHODS)} are supported")
    require(config, scoring_func="softmax", norm_topk_prob=False)
    routing(config, has_groups=config["topk_method"] != "greedy")
    return common_spec(config, "deepseek_v2")


def require(config: dict[str, Any], **supported: Any) -> None:
    """Refuse any value but the supported one, for keys that the original code reads and all published checkpoints share."""
    for key, value in supported.items():
        if config.get(key, value) not in (value, None):
            raise ConfigError(f"{key} is {str(config[key])[:40]!r}: only {value!r} is supported")


def common_spec(config: dict[str, Any], family: str) -> ModelSpec:
    """The spec of V2 and V3. Values are checked here, not in layers: only errors raised here name the file."""
    llama.epsilon(config)
    require_causal(config)
    llama.check_rope(config)
    require(config, moe_layer_freq=1)
    sizes = latent_sizes(config)
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {str(config['hidden_act'])[:40]!r}: experts are supported with silu only")
    positive(config, "moe_intermediate_size")
    positive(config, "n_shared_experts")
    return ModelSpec(
        family=family,
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=positive(config, "num_attention_heads"),
        num_kv_heads=1,  # a latent has no heads
        head_size=sizes.latent + sizes.rotated,
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        context_len=positive(config, "max_position_embeddings"),
        longest_len=longest_len(rope_settings(config)),
        num_experts=positive(config, "n_routed_experts"),
    )


def latent_sizes(config: dict[str, Any]) -> LatentSizes:
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if positive(config, key) % 2:
            raise ConfigError(f"{key} is {config[key]}: it must be even, because rotary positions rotate pairs")
    return LatentSizes(
        latent=positive(config, "kv_lora_rank"),
        rotated=positive(config, "qk_rope_head_dim"),
        unrotated=positive(config, "qk_nope_head_dim"),
        value=positive(config, "v_head_dim"),
        query=0 if config["q_lora_rank"] is None else positive(config, "q_lora_rank"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedRouting:
    num_experts: int
    num_chosen: int
    factor: float  # multiplies the weights of the chosen experts
    num_groups: int = 1
    num_chosen_groups: int = 1  # the chosen experts come from these


def routing(config: dict[str, Any], has_groups: bool) -> GroupedRouting:
    found = GroupedRouting(
        positive(config, "n_routed_experts"),
        positive(config, "num_experts_per_tok"),
        number(config, "routed_scaling_factor", 1.0),
        positive(config, "n_group") if has_groups else 1,
        positive(config, "topk_group") if has_groups else 1,
    )
    size = found.num_experts // found.num_groups
    if found.num_experts % found.num_groups or not 1 <= found.num_chosen_groups <= found.num_groups:
        raise ConfigError(
            f"n_routed_experts {found.num_experts} must split into n_group {found.num_groups} groups, of which "
            f"topk_group {found.num_chosen_groups} are chosen: correct whichever is wrong"
        )
    if found.num_chosen > size * found.num_chosen_groups:
        raise ConfigError(
            f"num_experts_per_tok is {found.num_chosen}, more than the {size * found.num_chosen_groups} experts to choose from"
        )
    return found


class SharedAndRouted(nn.Module):
    """x + shared(norm(x)) + Σ weight · expert(norm(x))."""

    def __init__(self, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm, context: BuildContext) -> None:
        super().__init__()
        self.norm = norm
        self.routing = self.read_routing(config)
        inner_size = positive(config, "moe_intermediate_size")
        shared = inner_size * positive(config, "n_shared_experts")
        self.shared = GatedMLP(spec.hidden_size, shared, "silu", norm, context)
        self.router = Router(spec.hidden_size, self.routing.num_experts, context, bias=False)
        self.experts = Experts(spec.hidden_size, inner_size, self.routing.num_experts, Gate(), context, bias=False)

    def read_routing(self, config: dict[str, Any]) -> GroupedRouting:
        return routing(config, has_groups=config["topk_method"] != "greedy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        normed = self.norm(x)
        chosen, weights = self.choose(self.router(normed).float())  # [T, K] each
        # The experts' layer applies a softmax, so its weights add up to 1: pass logarithms, and multiply by their sum afterwards.
        logits = torch.full((len(x), self.routing.num_experts), _NOT_CHOSEN, device=x.device)
        logits.scatter_(1, chosen, by_rows(torch.log, weights).clamp_(min=_NOT_CHOSEN / 2))
        routed = self.experts(normed, logits, self.routing.num_chosen, True, torch.zeros_like(x))
        routed = routed.mul_(weights.sum(dim=-1, keepdim=True))
        out: torch.Tensor = self.shared(x).add_(routed)
        return out

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] → the experts of each token and their weights, [T, K] each. A group's score is its best expert's."""
        scores = logits.softmax(dim=-1)
        best = self._by_group(scores).amax(dim=-1)
        weights, chosen = self._within(best, scores, 0.0).topk(self.routing.num_chosen, dim=-1)
        return chosen, weights * self.routing.factor

    def _by_group(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.view(len(scores), self.routing.num_groups, -1)

    def _within(self, of_groups: torch.Tensor, scores: torch.Tensor, otherwise: float) -> torch.Tensor:
        """scores [T, E], with `otherwise` for experts outside the groups with the highest scores."""
        groups = of_groups.topk(self.routing.num_chosen_groups, dim=-1).indices
        is_other = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, groups, False)
        return self._by_group(scores).masked_fill(is_other[:, :, None], otherwise).view(scores.shape)

    def weight_slots(self, name: str) -> WeightSlots:
        slots = self.router.weight_slots(f"{name}.gate")
        slots |= mlp_slots(self.shared, f"{name}.shared_experts")
        for index in range(self.routing.num_experts):
            expert = f"{name}.experts.{index}"
            slots |= self.experts.weight_slots(index, f"{expert}.gate_proj", f"{expert}.up_proj", f"{expert}.down_proj")
        return slots


def mlp_slots(mlp: GatedMLP, name: str) -> WeightSlots:
    return mlp.gate_up.weight_slots(f"{name}.gate_proj", f"{name}.up_proj") | mlp.down.weight_slots(f"{name}.down_proj")


class Layer(DecoderLayer):
    experts_type: type[SharedAndRouted] = SharedAndRouted

    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        norm, mlp_norm = (RMSNorm(spec.hidden_size, llama.epsilon(config), context) for _ in range(2))
        self.norms = {"input_layernorm": norm, "post_attention_layernorm": mlp_norm}
        sizes = latent_sizes(config)
        self.attention = LatentAttention(
            index,
            spec,
            sizes,
            norm,
            context.alone,
            context,
            scale=_scale(config, sizes),
            epsilon=_INNER_EPSILON,
            bias=bool(config.get("attention_bias", False)),
        )
        self.mlp: GatedMLP | SharedAndRouted
        if index < number(config, "first_k_dense_replace", 0):
            self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, "silu", mlp_norm, context)
        else:
            self.mlp = self.experts_type(config, spec, mlp_norm, context)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, batch, rotation)
        x = self.mlp(x)
        return x

    def weight_slots(self, name: str) -> WeightSlots:
        slots = self._attention_slots(f"{name}.self_attn")
        for key, norm in self.norms.items():
            slots |= norm.weight_slots(f"{name}.{key}")
        of_mlp = (
            mlp_slots(self.mlp, f"{name}.mlp")
            if isinstance(self.mlp, GatedMLP)
            else self.mlp.weight_slots(f"{name}.mlp")
        )
        return slots | of_mlp

    def _attention_slots(self, name: str) -> WeightSlots:
        part = self.attention
        slots = part.latent.weight_slots(f"{name}.kv_a_proj_with_mqa") | part.latent_norm.weight_slots(
            f"{name}.kv_a_layernorm"
        )
        slots |= part.output.weight_slots(f"{name}.o_proj") | {f"{name}.kv_b_proj.weight": part.up_slot()}
        if part.query_latent is None:
            return slots | part.query.weight_slots(f"{name}.q_proj")
        slots |= part.query_latent.weight_slots(f"{name}.q_a_proj") | part.query_norm.weight_slots(
            f"{name}.q_a_layernorm"
        )
        return slots | part.query.weight_slots(f"{name}.q_b_proj")


def _scale(config: dict[str, Any], sizes: LatentSizes) -> float:
    """The scale of scores. Yarn scales them beyond the rotated part, as set by mscale_all_dim."""
    settings = rope_settings(config)
    scale = float((sizes.unrotated + sizes.rotated) ** -0.5)
    over_all = number(settings, "mscale_all_dim", 0.0)
    if settings["rope_type"] == "default" or not over_all:
        return scale
    factor = float(settings.get("factor") or 1.0)
    stretch = 1.0 if factor <= 1.0 else 0.1 * over_all * math.log(factor) + 1.0
    return scale * stretch * stretch


class Model(CausalModel):
    names = TensorNames("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    layer_type: type[Layer] = Layer
    defaults = DEFAULTS

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        config = self.defaults | config
        inner_size = positive(config, "moe_intermediate_size")
        check_shares(
            context.group.size,
            num_attention_heads=spec.num_heads,
            intermediate_size=spec.intermediate_size,
            moe_intermediate_size=inner_size * (positive(config, "n_shared_experts") if context.splits_experts else 1),
        )
        super().__init__(
            spec,
            context,
            (self.layer_type(index, config, spec, context) for index in context.stage.layers(spec.num_layers)),
            RMSNorm(spec.hidden_size, llama.epsilon(config), context),
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )
        sizes = latent_sizes(config)
        # Add a half, so that rounding the quotient down never loses one.
        settings = rope_settings(config) | {"partial_rotary_factor": (sizes.rotated + 0.5) / spec.head_size}
        self.rope = Rope(settings, spec.head_size, context.device, context.ops, context.max_len)

    @classmethod
    def prediction_layer(cls, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> Layer:
        """The layer of a head for multi-token prediction, as its only layer: like the last ones of the model, with experts."""
        return cls.layer_type(0, cls.defaults | config | {"first_k_dense_replace": 0}, spec, context)

    def is_ignored(self, name: str) -> bool:
        # Layers for multi-token prediction come after the last one.
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        is_beyond = layer is not None and int(layer[1]) >= self.num_layers
        return is_beyond or name.endswith("rotary_emb.inv_freq") or super().is_ignored(name)
