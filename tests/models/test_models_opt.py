"""OPT against transformers: norms before and after, narrow embeddings, no biases, no learned norms; and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_greedy, check_logits, check_ranks
from tests.models.walk import build_from, prompts, reference_logits, tensors, walk

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
AFTER = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}  # as opt-350m


def opt(**changes: Any) -> PreTrainedModel:
    return checkpoints.telling(OPTForCausalLM(OPTConfig(**(SIZES | changes))))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms after, narrow embedding": AFTER,
    "narrow embedding, untied": {"word_embed_proj_dim": 32, "tie_word_embeddings": False},
    "galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "no last norm": {"_remove_final_layer_norm": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_equal_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    check_logits(opt(**changes), tmp_path)


def test_greedy_steps_equal_the_reference(tmp_path: Path) -> None:
    check_greedy(opt(), tmp_path, num_varied=2)


@pytest.mark.parametrize("changes", [{"vocab_size": 161}, AFTER], ids=["plain", "after"])
def test_two_ranks_equal_one(changes: dict[str, Any], tmp_path: Path) -> None:
    check_ranks(opt(**changes), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("changes", [{}, AFTER], ids=["plain", "after"])
def test_the_engine_equals_the_reference(
    changes: dict[str, Any], is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "operation by operation" not in check_engine(opt(**changes), tmp_path, monkeypatch, is_native)


def test_the_first_checkpoints_have_no_prefix() -> None:
    reference = opt()
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors(reference)}
    assert "decoder.embed_positions.weight" in weights
    ours, store = build_from(reference.config.to_dict(), iter(weights.items()))
    (tokens,) = prompts(seed=2, lengths=(30,))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


def test_the_last_position_is_used() -> None:
    """The table has two rows more than there are positions, before the first: none of either is out of reach."""
    reference = opt()
    ours, store = build_from(reference.config.to_dict(), tensors(reference))
    (tokens,) = prompts(seed=2, lengths=(128,))
    (logits,) = walk(ours, store, [tokens], seed=2)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ffn_dim": None}, "ffn_dim is missing"),
        ({"hidden_size": 50}, "hidden_size is 50, which is no multiple of num_attention_heads, 4"),
        ({"word_embed_proj_dim": "wide"}, "word_embed_proj_dim is 'wide'"),
        ({"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family("opt").spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message


def test_an_activation_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation 'mish' is not supported"):
        build_from(SIZES | {"model_type": "opt", "activation_function": "mish"}, iter(()))
