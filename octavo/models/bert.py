"""BERT: an encoder with learned positions and norms after attention and MLP. Its output is the hidden states or, if it was trained as a
sequence classifier, a number for each label."""

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.layers.attention import SelfAttention
from octavo.layers.context import BuildContext
from octavo.layers.embedding import LearnedPositions
from octavo.layers.mlp import MLP
from octavo.layers.model import DecoderLayer, DecoderModel
from octavo.layers.norm import LayerNorm
from octavo.layers.sharding import WeightSlot, WeightSlots, check_shares, plain
from octavo.models import gguf_vocab_size, number, positive, share
from octavo.quants import SameWeight, Weight
from octavo.spec import ModelSpec

_PREFIXES = ("bert.", "roberta.")  # of checkpoints that were saved with a head
_HEADS = ("pooler.", "cls.", "lm_head.", "classifier.")  # heads that are not used
_CLASSIFIER = "ForSequenceClassification"  # how the class of a model with a classification head ends


def spec(config: dict[str, Any], first_position: int = 0) -> ModelSpec:
    """`first_position`: the row of the position table that a prompt's first token uses."""
    if config.get("is_decoder"):
        raise ConfigError("is_decoder is set: only BERT models that encode are supported")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(
            f"position_embedding_type is {config['position_embedding_type']!r}: only absolute positions are supported"
        )
    _epsilon(config)  # checked here, not in a layer: only errors raised here name the file
    num_positions = positive(config, "max_position_embeddings", 512)
    if num_positions <= first_position:
        raise ConfigError(f"max_position_embeddings is {num_positions}: it must be above {first_position}")
    num_heads = positive(config, "num_attention_heads")
    return ModelSpec(
        family="bert",
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=positive(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=share(config, "hidden_size", "num_attention_heads"),
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        context_len=num_positions - first_position,
        is_encoder=True,
        num_labels=_num_labels(config),
    )


def _num_labels(config: dict[str, Any]) -> int:
    """Of the classification head; 0: there is none. Configurations leave the labels out if there are two."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes or not str(classes[0]).endswith(_CLASSIFIER):
        return 0
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return positive(config, "num_labels", 2)


def _epsilon(config: dict[str, Any]) -> float:
    return number(config, "layer_norm_eps", 1e-12)


class Layer(DecoderLayer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, index: int, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.attention = SelfAttention(index, spec, None, context, qkv_bias=True, output_bias=True)
        self.attention_norm = LayerNorm(spec.hidden_size, _epsilon(config), context)
        act = config.get("hidden_act", "gelu")
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, act, None, context)
        self.mlp_norm = LayerNorm(spec.hidden_size, _epsilon(config), context)

    def forward(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor | None) -> torch.Tensor:
        x = self.attention_norm(self.attention(x, batch, rotation))
        x = self.mlp_norm(self.mlp(x))
        return x

    def weight_slots(self, name: str) -> WeightSlots:
        heads = f"{name}.attention.self"
        return (
            self.attention.qkv.weight_slots(f"{heads}.query", f"{heads}.key", f"{heads}.value")
            | self.attention.output.weight_slots(f"{name}.attention.output.dense")
            | self.attention_norm.weight_slots(f"{name}.attention.output.LayerNorm")
            | self.mlp.up.weight_slots(f"{name}.intermediate.dense")
            | self.mlp.down.weight_slots(f"{name}.output.dense")
            | self.mlp_norm.weight_slots(f"{name}.output.LayerNorm")
        )


class Classifier(nn.Module):
    """The head of a sequence classifier: output(tanh(dense(x))). Whole on every rank, and computed in float32."""

    def __init__(self, hidden_size: int, num_labels: int, context: BuildContext) -> None:
        super().__init__()
        self.dense, self.dense_bias = context.empty(hidden_size, hidden_size), context.empty(hidden_size)
        self.output, self.output_bias = context.empty(num_labels, hidden_size), context.empty(num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] → [N, num_labels]."""
        x = torch.tanh(F.linear(x.float(), self.dense.float(), self.dense_bias.float()))
        return F.linear(x, self.output.float(), self.output_bias.float())

    def weight_slots(self, dense: str, output: str) -> WeightSlots:
        return {
            f"{dense}.weight": _whole(self.dense),
            f"{dense}.bias": _whole(self.dense_bias),
            f"{output}.weight": _whole(self.output),
            f"{output}.bias": _whole(self.output_bias),
        }


def _whole(target: torch.Tensor) -> WeightSlot:
    def store(tensor: Weight) -> None:
        target.copy_(plain(tensor))

    return WeightSlot(tuple(target.shape), store)


class Model(DecoderModel):
    first_position = 0
    classifier_names = ("pooler.dense", "classifier")

    def __init__(self, config: dict[str, Any], spec: ModelSpec, context: BuildContext) -> None:
        check_shares(
            context.group.size,
            num_attention_heads=spec.num_heads,
            intermediate_size=spec.intermediate_size,
        )
        layers = (Layer(index, config, spec, context) for index in context.stage.layers(spec.num_layers))
        super().__init__(spec, context, layers)
        self.positions = LearnedPositions(spec.context_len, spec.hidden_size, context)
        self.token_types = context.empty(positive(config, "type_vocab_size", 2), spec.hidden_size)
        self.norm = LayerNorm(spec.hidden_size, _epsilon(config), context)
        self.classifier: Classifier | None = None
        if spec.num_labels:
            self.classifier = Classifier(spec.hidden_size, spec.num_labels, context)

    def embed(self, batch: Batch) -> torch.Tensor:
        x: torch.Tensor = self.positions(super().embed(batch), batch.positions)
        if batch.is_second is not None and len(self.token_types) > 1:
            x = x + batch.is_second.unsqueeze(1) * (self.token_types[1] - self.token_types[0]).to(x.dtype)
        embedded: torch.Tensor = self.norm(x)
        return embedded

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.classifier is not None, "admission refuses labels of a model without a classification head"
        logits: torch.Tensor = self.classifier(hidden)
        return logits

    def weight_slots(self) -> WeightSlots:
        table = self.positions.weight

        def store_positions(tensor: Weight) -> None:
            table.copy_(plain(tensor)[self.first_position :])

        def store_types(tensor: Weight) -> None:
            self.token_types.copy_(plain(tensor))

        assert self.embedding is not None, "an encoder has one stage"
        slots = self.embedding.weight_slots("embeddings.word_embeddings") | self.norm.weight_slots(
            "embeddings.LayerNorm"
        )
        shape = (table.shape[0] + self.first_position, table.shape[1])
        slots["embeddings.position_embeddings.weight"] = WeightSlot(shape, store_positions)
        slots["embeddings.token_type_embeddings.weight"] = WeightSlot(tuple(self.token_types.shape), store_types)
        if self.classifier is not None:
            slots |= self.classifier.weight_slots(*self.classifier_names)
        return slots | self.layer_slots("encoder.layer")

    def is_ignored(self, name: str) -> bool:
        # Old checkpoints store the position ids.
        return name.startswith(_HEADS) or name == "embeddings.position_ids"

    def finish_loading(self) -> None:
        # Nearly all prompts are one text, whose tokens have the first type: add its vector to the positions once, here.
        self.positions.weight.add_(self.token_types[0])

    def hf_name(self, name: str) -> str:
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        # The first published checkpoints call a norm's weight gamma and its bias beta.
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

GGUF_ROWS_STAY_WHOLE = True  # gguf_fix moves whole rows only, so packed weights need not be decoded for it
_GGUF_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_GGUF_LAYER_NAMES = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, object]) -> dict[str, Any]:
    """Make an HF-style config from a GGUF file's metadata."""
    return {
        "model_type": "bert",
        "hidden_size": positive(metadata, "bert.embedding_length"),
        "num_hidden_layers": positive(metadata, "bert.block_count"),
        "num_attention_heads": positive(metadata, "bert.attention.head_count"),
        "intermediate_size": positive(metadata, "bert.feed_forward_length"),
        "max_position_embeddings": positive(metadata, "bert.context_length"),
        "layer_norm_eps": number(metadata, "bert.attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": positive(metadata, "tokenizer.ggml.token_type_count", 2),
        "vocab_size": gguf_vocab_size(metadata, "bert.vocab_size"),
        "is_decoder": metadata.get("bert.attention.causal", False),
    }


def gguf_name(name: str) -> str | None:
    """The HF name of a GGUF tensor; None: the model does not use it."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    names = _GGUF_NAMES if match is None or match[1] is None else _GGUF_LAYER_NAMES
    if match is None or match[2] not in names:
        return None
    return f"{'' if match[1] is None else f'encoder.layer.{match[1]}.'}{names[match[2]]}.{match[3]}"


def gguf_fix(name: str, tensor: SameWeight, config: dict[str, Any]) -> SameWeight:
    """Return the tensor unchanged: the converter keeps the checkpoint's order."""
    return tensor
