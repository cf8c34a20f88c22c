"""Families that are a Llama but for a trait or two, against transformers; and that those that are one under another name load."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.family_checks import check_engine, check_gguf, check_greedy, check_logits, check_ranks
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import tensors

SIZES = checkpoints.LLAMA
FOUR = {"num_hidden_layers": 4, "pad_token_id": 0}  # so that the last of every four layers is there


def mistral(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(MistralForCausalLM(MistralConfig(**(SIZES | {"sliding_window": 6} | changes))))


def smollm3(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(SmolLM3ForCausalLM(SmolLM3Config(**(SIZES | FOUR | changes))))


SLIDING = {"use_sliding_window": True, "sliding_window": 6}
CASES: list[Any] = [
    pytest.param(mistral, {}, None, id="mistral"),
    pytest.param(mistral, {"sliding_window": None, "head_dim": 20}, None, id="mistral no window"),
    pytest.param(mistral, {"sliding_window": 4096}, {"sliding_window": ...}, id="mistral window not given"),
    pytest.param(smollm3, {}, None, id="smollm3"),
    pytest.param(smollm3, {}, {"no_rope_layers": ..., "layer_types": ...}, id="smollm3 not given"),
    pytest.param(smollm3, {"no_rope_layers": [0, 1, 0, 1], "attention_bias": True}, None, id="smollm3 given"),
    pytest.param(smollm3, SLIDING | {"no_rope_layer_interval": 2}, None, id="smollm3 windows"),
    pytest.param(
        smollm3, SLIDING | {"no_rope_layer_interval": 2}, {"layer_types": ...}, id="smollm3 windows not given"
    ),
]


@pytest.mark.parametrize(("make", "changes", "written"), CASES)
def test_logits_equal_the_reference(
    make: Any, changes: dict[str, Any], written: dict[str, Any] | None, tmp_path: Path
) -> None:
    check_logits(make(**changes), tmp_path, written)


@pytest.mark.parametrize("make", [mistral, smollm3])
def test_greedy_steps_equal_the_reference(make: Any, tmp_path: Path) -> None:
    check_greedy(make(), tmp_path, num_varied=2)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check_ranks(smollm3(**SLIDING, no_rope_layer_interval=2), tmp_path)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("make", [mistral, smollm3])
def test_the_engine_equals_the_reference(
    make: Any, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "operation by operation" not in check_engine(make(), tmp_path, monkeypatch, is_native)


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_smollm3_equals_the_reference(is_tied: bool, tmp_path: Path) -> None:
    reference = smollm3(tie_word_embeddings=is_tied)
    weights = {n: t for n, t in tensors(reference) if not (is_tied and n == "lm_head.weight")}
    metadata = llama_metadata("smollm3") | {"general.architecture": "smollm3", "smollm3.block_count": 4}
    metadata |= {"smollm3.rope.freq_base": 2e6}
    check_gguf(reference, gguf_llama_weights(weights), metadata, tmp_path)


# ── what is read of a configuration ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["mistral", "smollm3"])
def test_what_is_not_given_is_as_transformers_has_it(family: str) -> None:
    kind = {"mistral": MistralConfig, "smollm3": SmolLM3Config}[family]
    left_out = ("num_key_value_heads", "max_position_embeddings")
    settings = {key: value for key, value in SIZES.items() if key not in left_out} | {"num_attention_heads": 8}
    expected, found = kind(**settings), load_family(family).spec(settings)
    assert found.family == family
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.context_len == expected.max_position_embeddings
    assert set(found.windows) == {expected.sliding_window or 0}


def test_a_window_as_long_as_the_context_is_none() -> None:
    spec = load_family("mistral").spec
    assert spec(SIZES | {"sliding_window": 127}).windows == (127,) * 3
    assert not spec(SIZES | {"sliding_window": 128}).has_window


# As their makers publish them, but for the sizes: all are Llamas.
NAMED: dict[str, dict[str, Any]] = {
    "Llama 2": {"rope_scaling": None, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "num_key_value_heads": 4},
    "Llama 3.2": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "head_dim": 12,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "Yi": {"rope_theta": 5000000.0, "num_key_value_heads": 1, "pad_token_id": 0},
    "SmolLM2": {"rope_theta": 100000, "rope_interleaved": False, "tie_word_embeddings": True, "is_llama_config": True},
    "long by yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}


@pytest.mark.parametrize("changes", NAMED.values(), ids=NAMED)
def test_llamas_as_they_are_published(changes: dict[str, Any], tmp_path: Path) -> None:
    check_logits(checkpoints.llama(**changes), tmp_path, changes | {"rope_parameters": ...})


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ("mistral", {"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 3 numbers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must be a list of 3 numbers"),
        ("smollm3", {"no_rope_layers": 3}, "no_rope_layers must be a list of 3 numbers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("smollm3", SLIDING | {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 names"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(family: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message
