"""GPT-2: learned positions, LayerNorm with bias, biases everywhere, weights stored transposed, tied head."""

from collections.abc import Mapping
from typing import Any

import torch

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.attention import SelfAttention
from octavo.layers.context import BuildContext
from octavo.layers.embedding import LearnedPositions
from octavo.layers.mlp import MLP
from octavo.layers.model import CausalModel, DecoderLayer, TensorNames
from octavo.layers.norm import LayerNorm, norm_slots
from octavo.layers.sharding import WeightSlot, WeightSlots, check_shares
from octavo.models import gguf_tensor_name, gguf_vocab_size, number, positive, require_causal, share
from octavo.quants import SameWeight
from octavo.spec import ModelSpec

_OUTPUTS_FIRST = "weights_have_outputs_first"  # our own key: true for GGUF files only


def spec(config: dict[str, Any]) -> ModelSpec:
    for key, unsupported in (("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True)):
        if config.get(key, False) is unsupported:
            raise ConfigError(f"this GPT-2 has {key} set, which is not supported")
    if config.get("scale_attn_weights", True) is False:
        raise ConfigError("this GPT-2 has scale_attn_weights switched off, which is not supported")
    require_causal(config)
    _epsilon(config)  # checked here, not in a layer: only errors raised here name the file
    num_heads, hidden_size = positive(config, "n_head"), positive(config, "n_embd")
    is_old = config.get("n_positions") is None and config.get("n_ctx") is not None
    return ModelSpec(
        family="gpt2",
        num_layers=positive(config, "n_layer"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=share(config, "n_embd", "n_head"),
        intermediate_size=positive(config, "n_inner", 4 * hidden_size),
        vocab_size=positive(config, "vocab_size"),
        context_len=positive(config, "n_ctx" if is_old else "n_positions"),
    )


def _epsilon(config: dict[str, Any]) -> float:
    return number(config, "layer_norm_epsilon", 1e-5)


class Layer(DecoderLayer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        epsilon = _epsilon(config)
        norm, mlp_norm = (LayerNorm(spec.hidden_size, epsilon, context) for _ in range(2))
        self.attention = SelfAttention(index, spec, norm, context, qkv_bias=True, output_bias=True)
        act = config.get("activation_function", "gelu_new")
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, act, mlp_norm, context)
        self.is_transposed = not config.get(_OUTPUTS_FIRST, False)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, batch, rotation)
        x = self.mlp(x)
        return x

    def weight_slots(self, name: str) -> WeightSlots:
        slots = (
            self.attention.qkv.fused_slots(f"{name}.attn.c_attn")
            | self.attention.output.weight_slots(f"{name}.attn.c_proj")
            | self.mlp.up.weight_slots(f"{name}.mlp.c_fc")
            | self.mlp.down.weight_slots(f"{name}.mlp.c_proj")
        )
        for key, slot in slots.items():
            if key.endswith(".weight") and self.is_transposed:
                slots[key] = _transposed(slot)
        norms = norm_slots(self.attention.norm, f"{name}.ln_1") | norm_slots(self.mlp.norm, f"{name}.ln_2")
        return slots | norms


def _transposed(slot: WeightSlot) -> WeightSlot:
    return WeightSlot((slot.shape[1], slot.shape[0]), lambda tensor: slot.store(tensor.t()))


class Model(CausalModel):
    names = TensorNames("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head")

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        check_shares(context.group.size, n_head=spec.num_heads, n_inner=spec.intermediate_size)
        super().__init__(
            spec,
            context,
            (Layer(index, config, spec, context) for index in context.stage.layers(spec.num_layers)),
            LayerNorm(spec.hidden_size, _epsilon(config), context),
            is_tied=bool(config.get("tie_word_embeddings", True)),
        )
        self.positions: LearnedPositions | None = None
        if context.stage.is_first:
            self.positions = LearnedPositions(spec.context_len, spec.hidden_size, context)

    def embed(self, batch: Batch) -> torch.Tensor:
        assert self.positions is not None, "this is not the first stage"
        embedded: torch.Tensor = self.positions(super().embed(batch), batch.positions)
        return embedded

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        return slots if self.positions is None else slots | self.positions.weight_slots("transformer.wpe")

    def is_ignored(self, name: str) -> bool:
        # Old checkpoints store the causal mask.
        return name.endswith((".attn.bias", ".attn.masked_bias")) or super().is_ignored(name)

    def hf_name(self, name: str) -> str:
        # The first published checkpoints lack the prefix.
        return f"transformer.{name}" if name.split(".")[0] in ("wte", "wpe", "h", "ln_f") else name


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NAMES = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata; `tensors`, its directory, supplies what the metadata lacks."""
    hidden_size = positive(metadata, "gpt2.embedding_length")
    return {
        "model_type": "gpt2",
        "n_embd": hidden_size,
        "n_layer": positive(metadata, "gpt2.block_count"),
        "n_head": positive(metadata, "gpt2.attention.head_count"),
        "n_inner": positive(metadata, "gpt2.feed_forward_length", 4 * hidden_size),
        "n_positions": positive(metadata, "gpt2.context_length"),
        "layer_norm_epsilon": number(metadata, "gpt2.attention.layer_norm_epsilon", 1e-5),
        "vocab_size": gguf_vocab_size(metadata, "gpt2.vocab_size"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in tensors,
        _OUTPUTS_FIRST: True,  # the converter transposes them; they are used like that, and stay packed
    }


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    return gguf_tensor_name(name, _GGUF_NAMES, "transformer.h", _GGUF_LAYER_NAMES)


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: the layers read the converter's layout."""
    return tensor
