"""GPT-NeoX and Pythia: attention and MLP in parallel, partial rotary positions, fused q, k and v."""

from collections.abc import Mapping
from typing import Any

import torch

from octavo.batch import Batch
from octavo.layers.attention import SelfAttention
from octavo.layers.context import BuildContext
from octavo.layers.mlp import MLP
from octavo.layers.model import CausalModel, DecoderLayer, TensorNames
from octavo.layers.norm import LayerNorm, norm_slots
from octavo.layers.rope import Rope, interleave, longest_len, rope_settings, rotated_size
from octavo.layers.sharding import WeightSlot, WeightSlots, check_shares
from octavo.models import gguf_tensor_name, gguf_vocab_size, llama, number, positive, require_causal, share
from octavo.quants import Quants, SameWeight
from octavo.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    require_causal(config)
    _epsilon(config)  # checked here, not in a layer: only errors raised here name the file
    settings = _rope(config)
    num_heads, head_size = positive(config, "num_attention_heads"), share(config, "hidden_size", "num_attention_heads")
    rotated_size(settings, head_size)
    return ModelSpec(
        family="gpt_neox",
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        context_len=positive(config, "max_position_embeddings", 2048),
        longest_len=longest_len(settings),
    )


def _epsilon(config: dict[str, Any]) -> float:
    return number(config, "layer_norm_eps", 1e-5)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings. Older files have the family's own names for them."""
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    own = {usual: config[name] for usual, name in names.items() if config.get(name) is not None}
    config = {"max_position_embeddings": 2048, "partial_rotary_factor": 0.25} | own | config
    llama.check_rope(config)
    return rope_settings(config, can_be_partial=True)


class Layer(DecoderLayer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        norm, mlp_norm = (LayerNorm(spec.hidden_size, _epsilon(config), context) for _ in range(2))
        bias = bool(config.get("attention_bias", True))
        self.attention = SelfAttention(index, spec, norm, context, qkv_bias=bias, output_bias=bias)
        act = config.get("hidden_act", "gelu")
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, act, mlp_norm, context)
        self.is_parallel = bool(config.get("use_parallel_residual", True))
        self.rotated = rotated_size(_rope(config), spec.head_size)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor) -> torch.Tensor:
        if not self.is_parallel:
            x = self.attention(x, batch, rotation)
            x = self.mlp(x)
            return x
        # The MLP reads x first, because attention may add its output to x in place.
        inner = self.mlp.inner(x)
        x = self.attention(x, batch, rotation)
        x = self.mlp.down(inner, x)
        return x

    def weight_slots(self, name: str) -> WeightSlots:
        return (
            self._qkv_slots(f"{name}.attention.query_key_value")
            | self.attention.output.weight_slots(f"{name}.attention.dense")
            | self.mlp.up.weight_slots(f"{name}.mlp.dense_h_to_4h")
            | self.mlp.down.weight_slots(f"{name}.mlp.dense_4h_to_h")
            | norm_slots(self.attention.norm, f"{name}.input_layernorm")
            | norm_slots(self.mlp.norm, f"{name}.post_attention_layernorm")
        )

    def _qkv_slots(self, name: str) -> WeightSlots:
        """The checkpoint's fused tensor: for each head, the rows of its query, key and value."""
        head_size = self.attention.heads.head_size

        def arranged(part: int, rows: Any) -> Any:
            return rows if part == 2 else interleave(rows, head_size, self.rotated)

        def by_head(slot: WeightSlot) -> WeightSlot:
            return WeightSlot(slot.shape, lambda tensor: slot.store(apart_by_kind(tensor, head_size)))

        return {key: by_head(slot) for key, slot in self.attention.qkv.fused_slots(name, arranged).items()}


def apart_by_kind(weight: SameWeight, head_size: int) -> SameWeight:
    """Rearrange rows [H, 3, D] to [3, H, D]: all queries, all keys, all values."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: apart_by_kind(rows, head_size))
    return weight.reshape(-1, 3, head_size, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def together_by_head(weight: SameWeight, head_size: int) -> SameWeight:
    """The inverse of `apart_by_kind`."""
    if isinstance(weight, Quants):
        return weight.rearranged(lambda rows: together_by_head(rows, head_size))
    return weight.reshape(3, -1, head_size, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


class Model(CausalModel):
    names = TensorNames("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out")

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        check_shares(
            context.group.size,
            num_attention_heads=spec.num_heads,
            intermediate_size=spec.intermediate_size,
        )
        super().__init__(
            spec,
            context,
            (Layer(index, config, spec, context) for index in context.stage.layers(spec.num_layers)),
            LayerNorm(spec.hidden_size, _epsilon(config), context),
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )
        self.rope = Rope(_rope(config), spec.head_size, context.device, context.ops, context.max_len)

    def is_ignored(self, name: str) -> bool:
        # Old checkpoints store the causal mask and the rope frequencies.
        is_old = name.endswith((".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"))
        return is_old or super().is_ignored(name)

    def hf_name(self, name: str) -> str:
        # Transformers 5 uses its common name for the head; the published checkpoints do not.
        return "embed_out.weight" if name == "lm_head.weight" else name


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NAMES = {
    "token_embd.weight": "gpt_neox.embed_in.weight",
    "output_norm.weight": "gpt_neox.final_layer_norm.weight",
    "output_norm.bias": "gpt_neox.final_layer_norm.bias",
    "output.weight": "embed_out.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    num_heads = positive(metadata, "gptneox.attention.head_count")
    width = positive(metadata, "gptneox.embedding_length")
    head_size = share(metadata, "gptneox.embedding_length", "gptneox.attention.head_count")
    # Add a half, so that rounding the quotient down never loses one.
    num_rotated = positive(metadata, "gptneox.rope.dimension_count", head_size) + 0.5
    return {
        "model_type": "gpt_neox",
        "hidden_size": width,
        "num_hidden_layers": positive(metadata, "gptneox.block_count"),
        "num_attention_heads": num_heads,
        "intermediate_size": positive(metadata, "gptneox.feed_forward_length"),
        "max_position_embeddings": positive(metadata, "gptneox.context_length"),
        "layer_norm_eps": number(metadata, "gptneox.attention.layer_norm_epsilon", 1e-5),
        "rotary_pct": min(1.0, num_rotated / head_size),
        "rotary_emb_base": number(metadata, "gptneox.rope.freq_base", 10000.0),
        "use_parallel_residual": metadata.get("gptneox.use_parallel_residual", True) is not False,
        "vocab_size": gguf_vocab_size(metadata, "gptneox.vocab_size"),
        "hidden_act": "gelu",  # not in the file; nearly all models use it
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    return gguf_tensor_name(name, _GGUF_NAMES, "gpt_neox.layers", _GGUF_LAYER_NAMES)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Undo the converter's change: it puts all queries first, then all keys, then all values."""
    if ".query_key_value." not in name:
        return tensor
    head_size = spec(config).head_size
    # Without a whole number of heads the shape is wrong: the slot raises an error that names the tensor.
    return together_by_head(tensor, head_size) if tensor.shape[0] % (3 * head_size) == 0 else tensor
