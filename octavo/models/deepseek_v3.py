"""DeepSeek-V3: a V2 whose router scores each expert with a sigmoid, and adds a learned bias to choose among them."""

from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.moe import by_rows
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import interleave
from octavo.layers.sharding import WeightSlot, WeightSlots, plain, unsharded
from octavo.models import deepseek_v2
from octavo.models.deepseek_v2 import GroupedRouting, common_spec, require, routing
from octavo.quants import Weight
from octavo.spec import ModelSpec

_TINY = 1e-20  # keeps a sum of weights from being 0
_DEFAULTS: dict[str, Any] = deepseek_v2.DEFAULTS | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    config = _DEFAULTS | config
    require(config, scoring_func="sigmoid", topk_method="noaux_tc")
    found = routing(config, has_groups=True)
    if found.num_experts < 2 * found.num_groups:
        raise ConfigError(
            f"n_group is {found.num_groups}: groups go by their two best experts, and there are only {found.num_experts}"
        )
    return common_spec(config, "deepseek_v3")


class SharedAndRouted(deepseek_v2.SharedAndRouted):
    def __init__(self, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm, context: BuildContext) -> None:
        super().__init__(config, spec, norm, context)
        self.is_normalised = bool(config.get("norm_topk_prob", True))
        self.favour = torch.empty(self.routing.num_experts, dtype=torch.float32, device=context.device)

    def read_routing(self, config: dict[str, Any]) -> GroupedRouting:
        return routing(config, has_groups=True)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A group's score is the sum of its two best. The learned bias affects the choice of experts, not their weights."""
        scores = by_rows(torch.sigmoid, logits)
        favoured = scores + self.favour
        best = self._by_group(favoured).topk(2, dim=-1).values.sum(dim=-1)
        chosen = self._within(best, favoured, float("-inf")).topk(self.routing.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return chosen, weights * self.routing.factor

    def weight_slots(self, name: str) -> WeightSlots:
        return super().weight_slots(name) | unsharded(f"{name}.gate.e_score_correction_bias", self.favour)


class Layer(deepseek_v2.Layer):
    experts_type = SharedAndRouted

    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__(index, config, spec, context)
        self.is_interleaved = config.get("rope_interleave", True) is not False

    def weight_slots(self, name: str) -> WeightSlots:
        """The rotated rows of queries and of the shared key are stored in pairs, or in halves if rope_interleave is false."""
        slots, sizes = super().weight_slots(name), self.attention.sizes
        if self.is_interleaved:
            return slots
        heads = {"q_proj": sizes.unrotated, "q_b_proj": sizes.unrotated, "kv_a_proj_with_mqa": sizes.latent}
        for module, first in heads.items():
            for kind in ("weight", "bias"):
                slot = slots.get(f"{name}.self_attn.{module}.{kind}")
                if slot is not None:
                    slots[f"{name}.self_attn.{module}.{kind}"] = _in_pairs(slot, first, sizes.rotated)
        return slots


def _in_pairs(slot: WeightSlot, first: int, rotated: int) -> WeightSlot:
    """Interleave the last `rotated` rows of each head, of rows [heads, first + rotated]."""

    def store(weight: Weight) -> None:
        tensor = plain(weight)
        heads = tensor.reshape(-1, first + rotated, *tensor.shape[1:])
        interleaved = interleave(heads[:, first:].flatten(0, 1), rotated).view(len(heads), rotated, *tensor.shape[1:])
        slot.store(torch.cat((heads[:, :first], interleaved), dim=1).view(tensor.shape))

    return WeightSlot(slot.shape, store)


class Model(deepseek_v2.Model):
    layer_type = Layer
    defaults = _DEFAULTS
