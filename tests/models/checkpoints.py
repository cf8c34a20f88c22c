"""Tiny random checkpoints of every family, made with transformers, which is also what they are compared with."""

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# 4 heads of 20 make 80, not the hidden size: the family's own sizes do not fit each other either.
QWEN3: dict[str, Any] = LLAMA | {"head_dim": 20}
GPT2: dict[str, Any] = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 160,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changes: Any) -> PreTrainedModel:
    return _randomised(LlamaForCausalLM(LlamaConfig(**(LLAMA | changes))))


def qwen3(**changes: Any) -> PreTrainedModel:
    return _randomised(Qwen3ForCausalLM(Qwen3Config(**(QWEN3 | changes))))


def gpt2(**changes: Any) -> PreTrainedModel:
    return _randomised(GPT2LMHeadModel(GPT2Config(**(GPT2 | changes))))


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that every part of the model shows in the logits, biases and norms included."""
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(noise + 1 if is_norm and name.endswith("weight") else noise)
    return model.eval()


def telling(model: PreTrainedModel) -> PreTrainedModel:
    """Of a model with biases everywhere, which all tokens share: products so large that tokens differ all the same."""
    with torch.no_grad():
        for name, parameter in _randomised(model).named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                parameter.mul_(0.3)
            elif parameter.dim() == 2 and "layers" in name:
                parameter.mul_(2)
    return model
