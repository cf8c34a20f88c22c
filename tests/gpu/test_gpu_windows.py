"""Layers with windows on a GPU, through the whole engine: page tables by group change no token, in graphs or out of them."""

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from octavo import LLM
from tests.engine.exactness import Reference, check, greedy_references

pytestmark = pytest.mark.gpu

VOCAB_SIZE, WINDOW = 300, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    torch.manual_seed(8)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.14,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    model = Qwen2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 17, 64, 65, 130, 200, 300)]
    stem = prompts[-1]
    prompts += [stem + [rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 5, 7, 9, 11, 13, 15)]
    return folder, greedy_references(model, prompts, 40)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_those_of_transformers(
    model: tuple[Path, list[Reference]], backend: str, enforce_eager: bool
) -> None:
    folder, references = model
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 128, "enforce_eager": enforce_eager}
    with LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        kv_cache_memory_bytes=2**26,
        attention_backend=backend,
        **options,
    ) as llm:
        assert llm.report.windows == (0, WINDOW, WINDOW)
        assert check(llm, references, "together") >= 14
        assert check(llm, references, "again, with prefixes found") >= 14
        assert llm.engine_stats()["prefix_hit_tokens"] > 300
        graphs = llm._loop.executor._runner.graphs
        assert (graphs is not None and graphs.num_captured > 0) == (backend == "triton" and not enforce_eager)
