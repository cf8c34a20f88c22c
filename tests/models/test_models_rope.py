"""Rope scalings that go by the length of a request, against transformers, and settings that no scaling can be made of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.walk import build, prompts, reference_logits, walk

TRAINED = 32
DYNAMIC = {
    "max_position_embeddings": TRAINED,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("backend", ["torch_cpu", "native_cpu"])
def test_dynamic_changes_nothing_within_what_the_model_was_trained_for(backend: str) -> None:
    reference = checkpoints.llama(**DYNAMIC)
    for max_len in (0, 20, TRAINED):
        ours, store = build(reference, backend, max_len=max_len)
        sequences = prompts(seed=7, lengths=(1, 12, 20) if max_len == 20 else (1, 12, TRAINED))
        for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=3), strict=True):
            torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_len", [TRAINED + 1, 47, 64])
def test_dynamic_stretches_for_the_longest_request_and_for_every_one_alike(max_len: int) -> None:
    """Transformers' logits for a sequence of just that length, whatever pieces it comes in; a shorter one has the same
    waves, so that they may share pages: it is not what transformers has for that one."""
    ours, store = build(checkpoints.llama(**DYNAMIC), max_len=max_len)
    (long,) = prompts(seed=7, lengths=(max_len,))
    found = walk(ours, store, [long, long[:20]], seed=3)
    expected = reference_logits(checkpoints.llama(**DYNAMIC), long)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected[:20], atol=1e-4, rtol=1e-4)
    if max_len > 40:
        unstretched = reference_logits(checkpoints.llama(), long)
        assert (expected - unstretched).abs().max() > 0.1, "the stretch does not show"


def test_dynamic_is_stretched_by_max_model_len(tmp_path: Path) -> None:
    reference = checkpoints.llama(**DYNAMIC)
    reference.save_pretrained(tmp_path)
    (tokens,) = prompts(seed=11, lengths=(47,))
    llm = LLM(str(tmp_path), max_model_len=48, kv_cache_memory_bytes=2**20)
    (answer,) = llm.generate(tokens, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
    (token,) = answer.outputs[0].token_ids
    llm.close()
    # Only all 48 together have transformers' waves for 48.
    assert reference_logits(reference, [*tokens, token])[46].argmax() == token
    with pytest.raises(ConfigError, match=r"beyond the model's context of 32, which can be extended to 64; lower it"):
        LLM(str(tmp_path), max_model_len=65)


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"rope_type": "dynamic"}, "rope type 'dynamic' needs a factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, "needs a high_freq_factor above its low"),
        (
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
            "rope_theta is 1.0: rope type 'yarn' needs a value above 1",
        ),
        ({"rope_type": ["yarn"]}, r"rope type \['yarn'\] is not supported"),
    ],
)
def test_settings_that_no_scaling_can_be_made_of(rope: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_family("llama").spec(checkpoints.LLAMA | {"rope_parameters": rope})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3"])
def test_a_scaling_needs_to_know_what_the_model_was_trained_for(kind: str) -> None:
    config = {key: value for key, value in checkpoints.LLAMA.items() if key != "max_position_embeddings"}
    with pytest.raises(ConfigError, match=r"needs (original_)?max_position_embeddings in config\.json"):
        load_family("llama").spec(config | {"rope_scaling": {"type": kind, "factor": 2.0}})
