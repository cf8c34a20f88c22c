"""Our logits against transformers', for every trait of every family, over ragged, chunked, paged batches."""

from typing import Any

import pytest
import torch

from tests.models import checkpoints
from tests.models.walk import build, greedy, prompts, reference_greedy, reference_logits, walk

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "given head size": {"head_dim": 20},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "yarn, given": {
        "rope_parameters": YARN
        | {"rope_theta": 500.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False}
    },
    "yarn, mscale": {"rope_parameters": YARN | {"rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 1.2}},
}
GPT2S: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner width": {"n_inner": 72},
    "untied": {"tie_word_embeddings": False},
    "relu": {"activation_function": "relu"},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
QWEN3S: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "unused window": {"sliding_window": 6, "max_window_layers": 1},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "window, later layers": WINDOW | {"max_window_layers": 1},
    "window, all layers": WINDOW | {"max_window_layers": 0},
    "window, given": WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
CASES = [pytest.param(checkpoints.llama, c, id=f"llama {n}") for n, c in LLAMAS.items()]
CASES += [pytest.param(checkpoints.qwen3, c, id=f"qwen3 {n}") for n, c in QWEN3S.items()]
CASES += [pytest.param(checkpoints.gpt2, c, id=f"gpt2 {n}") for n, c in GPT2S.items()]


@pytest.mark.parametrize("backend", ["reference", "torch_cpu", "native_cpu"])
@pytest.mark.parametrize(("make", "changes"), CASES)
def test_logits_equal_the_reference(make: Any, changes: dict[str, Any], backend: str) -> None:
    check_logits(make(**changes), backend)


@pytest.mark.parametrize("changes", WINDOWED.values(), ids=WINDOWED)
def test_logits_with_windows_equal_the_reference(changes: dict[str, Any]) -> None:
    reference = checkpoints.qwen3(**changes)
    config = reference.config.to_dict()
    check_logits(reference, "reference", config)
    if "layer_types" not in changes:  # as config.json files have it; transformers writes the list into its copy
        del config["layer_types"]
        check_logits(reference, "reference", config)


def check_logits(reference: Any, backend: str, config: dict[str, Any] | None = None) -> None:
    ours, store = build(reference, backend, config=config)
    sequences = prompts(seed=7)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=3), strict=True):
        expected = reference_logits(reference, tokens)
        assert expected.std() > 0.1, "logits too flat to tell anything"
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [checkpoints.llama, checkpoints.qwen3, checkpoints.gpt2])
def test_greedy_steps_equal_the_reference(make: Any) -> None:
    reference = make()
    ours, store = build(reference)
    sequences = prompts(seed=5, lengths=(3, 18, 30))
    found = greedy(ours, store, sequences, 64)
    guesses = zip(sequences, found, strict=True)
    assert found == [reference_greedy(reference, tokens, 64, guess) for tokens, guess in guesses]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "torch_cpu"])
@pytest.mark.parametrize("make", [checkpoints.llama, checkpoints.qwen3, checkpoints.gpt2])
def test_16_bit_logits_are_near(make: Any, backend: str, dtype: torch.dtype) -> None:
    reference = make()
    ours, store = build(reference, backend, dtype)
    sequences = prompts(seed=9)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=4), strict=True):
        assert logits.dtype == dtype
        logits = logits.float()
        expected = reference_logits(reference, tokens)
        # 8 bits of mantissa over three layers; a wrong head, page or scaling is off by the size of a logit.
        assert (logits - expected).abs().mean() < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.std()


def test_rope_settings_of_old_configs_are_read() -> None:
    reference = checkpoints.llama(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0})
    config = reference.config.to_dict()
    del config["rope_parameters"]
    old = config | {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    ours, store = build(reference, config=old)
    (tokens,) = prompts(seed=1, lengths=(40,))
    (logits,) = walk(ours, store, [tokens], seed=1)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)
