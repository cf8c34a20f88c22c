"""--deterministic on a GPU: the same bits alone, in batches of 2, 17 and 64, in chunks, from the cache, preempted, restarted.
Runs the self-test of `octavo doctor --determinism` on small models of every kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octavo.cli.doctor.determinism import Verdict, examine
from octavo.config import Config, replace

pytestmark = pytest.mark.gpu

SHAPE = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
LLAMA = (LlamaForCausalLM, LlamaConfig, {"initializer_range": 0.1})
QWEN = (Qwen3ForCausalLM, Qwen3Config, {"initializer_range": 0.1, "head_dim": 128})
MOE = (
    Qwen3MoeForCausalLM,
    Qwen3MoeConfig,
    {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "initializer_range": 0.1},
)
GEMMA = (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 64, "head_dim": 80, "initializer_range": 0.1})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LLAMA, {}),
        (QWEN, {}),
        (QWEN, {"dtype": "float16"}),
        (QWEN, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        (MOE, {}),
        (GEMMA, {}),
    ],
    ids=["llama", "qwen3", "float16", "fp8", "moe", "gemma2"],
)
def test_the_same_bits_in_every_way(
    kind: tuple[Any, Any, dict[str, Any]], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(11)
    model_class, config_class, own = kind
    model: PreTrainedModel = model_class(config_class(**SHAPE | own))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    values = {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory_bytes": 2**27, **options}
    config = replace(Config(), model=str(tmp_path), deterministic=True, **values)
    verdicts = [found for found in examine(config) if isinstance(found, Verdict)]
    assert len(verdicts) >= 11
    assert [verdict for verdict in verdicts if not verdict.is_same] == []
