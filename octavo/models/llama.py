"""Llama: RMSNorm, rotary positions, grouped-query attention, gated MLP, tied or untied head."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.attention.qk_norm_rope import HeadNorms
from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.attention import SelfAttention
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.model import CausalModel, DecoderLayer, TensorNames
from octavo.layers.norm import RMSNorm, SplitRMSNorm
from octavo.layers.rope import Rope, interleave, longest_len, rope_settings, split_halves
from octavo.layers.sharding import WeightSlot, WeightSlots, check_shares
from octavo.models import gguf_tensor_name, gguf_vocab_size, number, positive, require_causal, share
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_ROPE_FACTORS = "model.rope_factors"  # our name for a tensor that only GGUF files have
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
)


def spec(config: dict[str, Any]) -> ModelSpec:
    require_causal(config)
    epsilon(config)  # these two are checked here, not in a layer: only errors raised here name the file
    check_rope(config)
    num_heads = positive(config, "num_attention_heads")
    if config.get("num_key_value_heads") is not None:
        share(config, "num_attention_heads", "num_key_value_heads")
    head_size = _head_size(config, "head_dim", "hidden_size", "num_attention_heads")
    return ModelSpec(
        family="llama",
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=positive(config, "num_key_value_heads", num_heads),
        head_size=head_size,
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        context_len=positive(config, "max_position_embeddings", 2048),
        longest_len=longest_len(rope_settings(config)),
    )


def epsilon(config: dict[str, Any]) -> float:
    return number(config, "rms_norm_eps", 1e-6)


def _head_size(table: Mapping[str, Any], key: str, hidden_size: str, num_heads: str) -> int:
    """The head size: the value at `key`, else the hidden size divided by the number of heads."""
    size = share(table, hidden_size, num_heads) if table.get(key) is None else positive(table, key)
    if size % 2:
        raise ConfigError(
            f"the size of a head ({key}) is {size}: it must be even, because rotary positions rotate pairs"
        )
    return size


def check_rope(config: dict[str, Any]) -> None:
    number(config, "rope_theta", 0.0)
    number(config, "original_max_position_embeddings", 0.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{key} is {str(rope)[:40]!r}: it must be an object with rope_type and what that needs")
        for name in _ROPE_NUMBERS:
            number(rope, name, 0.0)


class NormNames(NamedTuple):
    """The names of a layer's norms in checkpoints; "": the layer has no such norm."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


class Layer(DecoderLayer):
    """Parameters after `*` are for families that differ from Llama in these; families with another MLP override make_mlp and
    mlp_slots. `output_bias` None: as for q, k and v."""

    norm_names = NormNames()
    norm_offset = 0.0  # added to every norm's weight
    rotated = 0  # dimensions of a head that are rotated; 0: all

    def __init__(
        self,
        index: int,
        config: dict[str, Any],
        spec: ModelSpec,
        context: BuildContext,
        *,
        window: int = 0,
        softcap: float = 0.0,
        scale: float | None = None,
        has_head_norms: bool = False,
        qk_norms: tuple[SplitRMSNorm, SplitRMSNorm] | None = None,
        output_bias: bool | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        bias = bool(config.get("attention_bias", False))
        self.head_size = spec.head_size
        self.head_norms = self._make_head_norms(epsilon(config), context) if has_head_norms else None
        norms = [
            RMSNorm(spec.hidden_size, epsilon(config), context, offset=self.norm_offset) if name else None
            for name in self.norm_names
        ]
        self.norms = {name: norm for name, norm in zip(self.norm_names, norms, strict=True) if norm is not None}
        self.attention = SelfAttention(
            index,
            spec,
            norms[0],
            context,
            qkv_bias=bias,
            output_bias=bias if output_bias is None else output_bias,
            window=window,
            softcap=softcap,
            scale=scale,
            head_norms=self.head_norms,
            qk_norms=qk_norms,
            output_norm=norms[1],
            sinks=sinks,
        )
        self.mlp_output_norm = norms[3]
        self.mlp = self.make_mlp(index, config, spec, norms[2], context)

    def make_mlp(
        self, index: int, config: dict[str, Any], spec: ModelSpec, norm: RMSNorm | None, context: BuildContext
    ) -> nn.Module:
        return GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            config.get("hidden_act", "silu"),
            norm,
            context,
            bias=bool(config.get("mlp_bias", False)),
            output_norm=self.mlp_output_norm,
        )

    def _make_head_norms(self, epsilon: float, context: BuildContext) -> HeadNorms:
        """One weight for all heads, so every rank holds all of it. In float32 with an offset, for the reason given in RMSNorm."""
        dtype = torch.float32 if self.norm_offset else context.dtype
        self.q_norm, self.k_norm = (torch.empty(self.head_size, dtype=dtype, device=context.device) for _ in range(2))
        return HeadNorms(self.q_norm, self.k_norm, epsilon)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, batch, rotation)
        x = self.mlp(x)
        return x

    def weight_slots(self, name: str) -> WeightSlots:
        attention = f"{name}.self_attn"
        slots = (
            self.qkv_slots(attention) | self.attention.output.weight_slots(f"{attention}.o_proj") | self.mlp_slots(name)
        )
        for key, norm in self.norms.items():
            slots |= norm.weight_slots(f"{name}.{key}")
        for key, qk_norm in zip(("q_norm", "k_norm"), self.attention.qk_norms, strict=False):
            assert isinstance(qk_norm, SplitRMSNorm)
            slots |= qk_norm.weight_slots(f"{attention}.{key}")
        if self.head_norms is not None:
            slots[f"{attention}.q_norm.weight"] = self._head_norm_slot(self.head_norms.q)
            slots[f"{attention}.k_norm.weight"] = self._head_norm_slot(self.head_norms.k)
        return slots

    def _head_norm_slot(self, target: torch.Tensor) -> WeightSlot:
        def store(tensor: torch.Tensor) -> None:
            target.copy_(self.interleaved(tensor)).add_(self.norm_offset)

        return WeightSlot((self.head_size,), store)

    def qkv_slots(self, name: str) -> WeightSlots:
        """`name`: the attention's name in the checkpoint."""
        return self.slots_of(self.attention.qkv, name)

    def slots_of(self, qkv: ColumnLinear, name: str) -> WeightSlots:
        slots = qkv.weight_slots(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        for key, slot in slots.items():
            if "v_proj" not in key:
                slots[key] = WeightSlot(slot.shape, lambda t, store=slot.store: store(self.interleaved(t)))  # type: ignore[misc]
        return slots

    def interleaved(self, rows: SameWeight) -> SameWeight:
        """Rows of q or k, of their bias or of their norm's weight, in the order that the rotation expects."""
        return interleave(rows, self.head_size, self.rotated)

    def mlp_slots(self, name: str) -> WeightSlots:
        """`name`: the layer's name in the checkpoint."""
        assert isinstance(self.mlp, GatedMLP)
        gate_up = self.mlp.gate_up.weight_slots(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        return gate_up | self.mlp.down.weight_slots(f"{name}.mlp.down_proj")


def shares(spec: ModelSpec) -> dict[str, int]:
    """Sizes of a Layer that are split over ranks, by their name in config.json."""
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
    }


class Model(CausalModel):
    """Parameters after `*` are for families that differ from Llama in these."""

    names = TensorNames("model.embed_tokens", "model.layers", "model.norm", "lm_head")
    layer_type: type[Layer] = Layer
    expert_widths: tuple[str, ...] = ()
    """Of shares(), those that only experts have: they are not split where ranks have different experts."""
    rope: Rope

    def __init__(
        self,
        config: dict[str, Any],
        spec: ModelSpec,
        context: BuildContext,
        *,
        embedding_factor: float = 1.0,
        logits_factor: float = 1.0,
        logits_softcap: float = 0.0,
    ) -> None:
        shares = self.shares(config, spec)
        if context.splits_experts:
            shares = {name: extent for name, extent in shares.items() if name not in self.expert_widths}
        check_shares(context.group.size, **shares)
        offset = self.layer_type.norm_offset
        super().__init__(
            spec,
            context,
            (self.layer_type(index, config, spec, context) for index in context.stage.layers(spec.num_layers)),
            # Multiplied into the last norm's weight, the logits' factor costs nothing.
            RMSNorm(spec.hidden_size, epsilon(config), context, offset=offset, factor=logits_factor),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            embedding_factor=embedding_factor,
            logits_softcap=logits_softcap,
        )
        self._logits_factor = logits_factor
        self.rope = self.make_rope(self.rope_settings(config), spec, context)

    def shares(self, config: dict[str, Any], spec: ModelSpec) -> dict[str, int]:
        """Sizes that are split over ranks, by their name in config.json."""
        return shares(spec)

    def rope_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return rope_settings(config)

    def make_rope(self, settings: dict[str, Any], spec: ModelSpec, context: BuildContext) -> Rope:
        return Rope(settings, spec.head_size, context.device, context.ops, context.max_len)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().final(hidden) / self._logits_factor

    def weight_slots(self) -> WeightSlots:
        shape = tuple(self.rope.frequencies.shape)
        return super().weight_slots() | {
            _ROPE_FACTORS: WeightSlot(shape, self.rope.divide_frequencies, is_optional=True)
        }

    def is_ignored(self, name: str) -> bool:
        # Old checkpoints store the rope frequencies.
        return name.endswith("rotary_emb.inv_freq") or super().is_ignored(name)

    def hf_name(self, name: str) -> str:
        # Checkpoints of embedding models were saved without the head's wrapper, and lack the prefix.
        return f"model.{name}" if name.split(".")[0] in ("embed_tokens", "layers", "norm") else name


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": _ROPE_FACTORS,
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object], architecture: str = "llama") -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks.
    `architecture`: the prefix of its keys."""
    attention, width = f"{architecture}.attention", f"{architecture}.embedding_length"
    num_heads = positive(metadata, f"{attention}.head_count")
    head_size = _head_size(metadata, f"{attention}.key_length", width, f"{attention}.head_count")
    if positive(metadata, f"{attention}.value_length", head_size) != head_size:
        raise ConfigError(f"{attention}.value_length is not its key_length, {head_size}, which is not supported")
    if number(metadata, f"{architecture}.expert_count", 0) and "blk.0.ffn_up.weight" not in tensors:
        raise ConfigError(
            f"{architecture}.expert_count says that this model has experts, which are not read from GGUF files of this "
            "architecture: pass a folder with safetensors"
        )
    return {
        "model_type": architecture,
        "hidden_size": positive(metadata, width),
        "num_hidden_layers": positive(metadata, f"{architecture}.block_count"),
        "intermediate_size": positive(metadata, f"{architecture}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": positive(metadata, f"{attention}.head_count_kv", num_heads),
        "head_dim": head_size,
        "rms_norm_eps": number(metadata, f"{attention}.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": positive(metadata, f"{architecture}.context_length", 2048),
        "vocab_size": gguf_vocab_size(metadata, f"{architecture}.vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "is_causal": metadata.get(f"{attention}.causal", True),
        "rope_parameters": _gguf_rope(metadata, architecture, head_size),
    }


def _gguf_rope(metadata: dict[str, Any], architecture: str, head_size: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": number(metadata, f"{architecture}.rope.freq_base", 10000.0),
    }
    num_rotated = positive(metadata, f"{architecture}.rope.dimension_count", head_size)
    if num_rotated != head_size:  # families without partial rotation refuse it
        rope["partial_rotary_factor"] = num_rotated / head_size
    scaling = f"{architecture}.rope.scaling"
    kind = metadata.get(f"{scaling}.type", "none")
    factor = number(metadata, f"{scaling}.factor", 0.0) or number(metadata, f"{architecture}.rope.scale_linear", 0.0)
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"the GGUF file's rope scaling {kind!r} is not supported; none, linear and yarn are")
    if factor and factor != 1.0:
        rope["rope_type"] = "linear" if kind == "none" else kind
        rope["factor"] = factor
        rope["original_max_position_embeddings"] = number(metadata, f"{scaling}.original_context_length", 0.0)
    return rope


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    return gguf_tensor_name(name, _GGUF_NAMES, "model.layers", _GGUF_LAYER_NAMES)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Undo the converter's change: it interleaves the rows of q and k for its own rotary kernel."""
    if name.rsplit(".", 2)[-2] not in ("q_proj", "k_proj"):
        return tensor
    head_size = spec(config).head_size
    # Without a whole number of heads the shape is wrong: the slot raises an error that names the tensor.
    return split_halves(tensor, head_size) if tensor.shape and tensor.shape[0] % head_size == 0 else tensor
