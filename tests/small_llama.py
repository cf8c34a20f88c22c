"""A Llama of two small layers with random weights, for tests that compare with transformers."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(vocab_size: int = 97, spread: float = 0.4, **more: Any) -> LlamaForCausalLM:
    """`spread`: of the weights; 0.4 is far from uniform, so that near ties are rare. Seed torch before."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=spread,
        **{"max_position_embeddings": 256, **more},
    )
    return LlamaForCausalLM(config).eval().float()
