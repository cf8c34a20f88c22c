"""OPT and Galactica: learned positions, LayerNorm before or after, plain MLP, embeddings that may be narrower than the layers."""

from typing import Any

import torch

from octavo.batch import Batch
from octavo.layers.attention import SelfAttention
from octavo.layers.context import BuildContext
from octavo.layers.embedding import LearnedPositions
from octavo.layers.linear import ColumnLinear
from octavo.layers.mlp import MLP
from octavo.layers.model import CausalModel, DecoderLayer, TensorNames
from octavo.layers.norm import LayerNorm
from octavo.layers.sharding import WeightSlots, check_shares
from octavo.models import positive, require_causal, share
from octavo.spec import ModelSpec

_EPSILON = 1e-5
_NUM_SKIPPED = 2  # rows of the position table before the first position


def spec(config: dict[str, Any]) -> ModelSpec:
    require_causal(config)
    _embedding_size(config)  # checked here, not in a layer: only errors raised here name the file
    num_heads = positive(config, "num_attention_heads")
    return ModelSpec(
        family="opt",
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=share(config, "hidden_size", "num_attention_heads"),
        intermediate_size=positive(config, "ffn_dim"),
        vocab_size=positive(config, "vocab_size"),
        context_len=positive(config, "max_position_embeddings", 2048),
    )


def _embedding_size(config: dict[str, Any]) -> int:
    return positive(config, "word_embed_proj_dim", positive(config, "hidden_size"))


def _flag(config: dict[str, Any], name: str, default: bool = True) -> bool:
    return bool(config.get(name, default))


def _norm(config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> LayerNorm:
    return LayerNorm(spec.hidden_size, _EPSILON, context, _flag(config, "layer_norm_elementwise_affine"))


class Layer(DecoderLayer):
    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (_norm(config, spec, context) for _ in range(2))
        self.is_before = _flag(config, "do_layer_norm_before")
        bias = _flag(config, "enable_bias")
        norm, mlp_norm = (self.attention_norm, self.mlp_norm) if self.is_before else (None, None)
        self.attention = SelfAttention(index, spec, norm, context, qkv_bias=bias, output_bias=bias)
        act = config.get("activation_function", "relu")
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, act, mlp_norm, context, bias=bias)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, batch, rotation)
        if not self.is_before:
            x = self.attention_norm(x)
        x = self.mlp(x)
        return x if self.is_before else self.mlp_norm(x)

    def weight_slots(self, name: str) -> WeightSlots:
        attention = f"{name}.self_attn"
        return (
            self.attention.qkv.weight_slots(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
            | self.attention.output.weight_slots(f"{attention}.out_proj")
            | self.mlp.up.weight_slots(f"{name}.fc1")
            | self.mlp.down.weight_slots(f"{name}.fc2")
            | self.attention_norm.weight_slots(f"{name}.self_attn_layer_norm")
            | self.mlp_norm.weight_slots(f"{name}.final_layer_norm")
        )


class Model(CausalModel):
    names = TensorNames(
        "model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm", "lm_head"
    )

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        check_shares(context.group.size, num_attention_heads=spec.num_heads, ffn_dim=spec.intermediate_size)
        width = _embedding_size(config)
        has_norm = _flag(config, "do_layer_norm_before") and not _flag(config, "_remove_final_layer_norm", False)
        super().__init__(
            spec,
            context,
            (Layer(index, config, spec, context) for index in context.stage.layers(spec.num_layers)),
            _norm(config, spec, context) if has_norm else None,
            is_tied=_flag(config, "tie_word_embeddings"),
            embedding_size=width,
        )
        stage = context.stage
        self.positions: LearnedPositions | None = None
        if stage.is_first:
            self.positions = LearnedPositions(spec.context_len, spec.hidden_size, context, _NUM_SKIPPED)
        self.widen: ColumnLinear | None = None
        self.narrow: ColumnLinear | None = None
        if width != spec.hidden_size:
            # Small, and read once a step: held whole on every rank instead of gathered.
            self.widen = ColumnLinear(width, (spec.hidden_size,), context.alone) if stage.is_first else None
            self.narrow = ColumnLinear(spec.hidden_size, (width,), context.alone) if stage.is_last else None
            self.vector_size = width

    def embed(self, batch: Batch) -> torch.Tensor:
        x = super().embed(batch)
        if self.widen is not None:
            x = self.widen(x)
        assert self.positions is not None, "this is not the first stage"
        embedded: torch.Tensor = self.positions(x, batch.positions)
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.narrow is None:
            return super().logits(hidden)
        assert self.head is not None, "this is not the last stage"
        logits: torch.Tensor = self.head(self.narrow(hidden, self.norm))
        return logits

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.narrow is None:
            return super().final(hidden)
        narrow: torch.Tensor = self.narrow(hidden, self.norm)
        return narrow

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        if self.positions is not None:
            slots |= self.positions.weight_slots("model.decoder.embed_positions")
        if self.widen is not None:
            slots |= self.widen.weight_slots("model.decoder.project_in")
        if self.narrow is not None:
            slots |= self.narrow.weight_slots("model.decoder.project_out")
        return slots

    def hf_name(self, name: str) -> str:
        # The first published checkpoints lack the prefix.
        return f"model.{name}" if name.startswith("decoder.") else name
