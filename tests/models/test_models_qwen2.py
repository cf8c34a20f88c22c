"""The Qwen2 family against transformers: every trait over ragged batches, two ranks, GGUF files, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from octavo.errors import ConfigError
from octavo.models import load_family
from tests.models import checkpoints
from tests.models.family_checks import check_gguf, check_greedy, check_logits, check_ranks
from tests.models.test_models_loading import gguf_llama_weights, llama_metadata
from tests.models.walk import build, build_from, prompts, reference_logits, tensors, walk

SIZES = checkpoints.LLAMA
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "seven heads to a kv head": {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2},
    "given head size": {"head_dim": 20},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "yarn": {"rope_parameters": YARN},
    "unused window": {"sliding_window": 6, "max_window_layers": 1},
    # No setting of this family, whatever a config.json holds.
    "biases given otherwise": {"attention_bias": False, "mlp_bias": True},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "later layers": WINDOW | {"max_window_layers": 1},
    "all layers": WINDOW | {"max_window_layers": 0},
    "given": WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def qwen2(**changes: Any) -> PreTrainedModel:
    return checkpoints._randomised(Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes))))


@pytest.mark.parametrize("changes", PLAIN.values(), ids=PLAIN)
def test_logits_equal_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = qwen2(**changes)
    assert reference.config.to_dict().get("attention_bias") is changes.get("attention_bias")
    check_logits(reference, tmp_path)


@pytest.mark.parametrize("changes", WINDOWED.values(), ids=WINDOWED)
def test_logits_with_windows_equal_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    # As config.json files have it: transformers writes the list of layer types into its copy.
    check_logits(qwen2(**changes), tmp_path, None if "layer_types" in changes else {"layer_types": ...})


def test_greedy_steps_equal_the_reference(tmp_path: Path) -> None:
    check_greedy(qwen2(), tmp_path)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_16_bit_logits_are_near(dtype: torch.dtype, near: float) -> None:
    reference = qwen2()
    ours, store = build(reference, "torch_cpu", dtype)
    sequences = prompts(seed=9)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=4), strict=True):
        expected = reference_logits(reference, tokens)
        assert (logits.float() - expected).abs().mean() < near * expected.std()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check_ranks(qwen2(tie_word_embeddings=True, vocab_size=161), tmp_path)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_equals_the_reference(is_tied: bool, tmp_path: Path) -> None:
    reference = qwen2(tie_word_embeddings=is_tied, rope_parameters=YARN)
    weights = {n: t for n, t in tensors(reference) if not (is_tied and n == "lm_head.weight")}
    metadata = llama_metadata("qwen2") | {"general.architecture": "qwen2", "qwen2.rope.freq_base": 1e6}
    metadata |= {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    metadata |= {"qwen2.rope.scaling.original_context_length": 32}
    config = check_gguf(reference, gguf_llama_weights(weights, is_permuted=False), metadata, tmp_path)
    assert config["tie_word_embeddings"] is is_tied


# ── what is read of a configuration, and what is refused ────────────────────────────────────────────


def test_the_spec_is_plain_integers() -> None:
    spec = load_family("qwen2").spec(qwen2(hidden_size=56, num_attention_heads=14).config.to_dict())
    assert (spec.family, spec.num_heads, spec.num_kv_heads, spec.head_size) == ("qwen2", 14, 2, 4)
    without = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    assert load_family("qwen2").spec(without).context_len == 32768
    assert load_family("qwen2").spec(without | {"max_position_embeddings": None}).context_len == 32768


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_makes_a_context_longer_than_config_json_says(key: str) -> None:
    assert load_family("qwen2").spec(SIZES | {key: YARN | {"original_max_position_embeddings": 100}}).context_len == 400


@pytest.mark.parametrize(
    ("changes", "has_window"),
    [
        (WINDOW | {"max_window_layers": 2}, True),
        (WINDOW | {"max_window_layers": 3}, False),
        (WINDOW, False),  # the default, 28, is beyond the last layer
        (WINDOW | {"max_window_layers": 0, "sliding_window": None}, False),
        (WINDOW | {"max_window_layers": 0, "use_sliding_window": False}, False),
        (WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention"] * 3}, False),
    ],
)
def test_whether_a_layer_has_a_window(changes: dict[str, Any], has_window: bool) -> None:
    assert load_family("qwen2").spec(SIZES | changes).has_window is has_window


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_of_unsaid_width_is_as_wide_as_transformers_says(family: str) -> None:
    config = SIZES | {"use_sliding_window": True, "max_window_layers": 2}
    assert Qwen2Config(**config).sliding_window == 4096
    assert load_family("qwen2").windows(config, 3) == [0, 0, 4096]
    assert load_family(family).spec(config).has_window


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple of num_key_value_heads"),
        ({"hidden_size": 50}, "hidden_size is 50, which is no multiple of num_attention_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_scaling": {"type": "yarn"}}, "needs a factor"),
        (WINDOW | {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        (WINDOW | {"max_window_layers": -1}, "max_window_layers is -1"),
        (WINDOW | {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 names"),
        (WINDOW | {"layer_types": ["chunked"] * 3}, "each full_attention or sliding_attention"),
    ],
)
def test_a_configuration_that_does_not_hold_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_family("qwen2").spec(SIZES | changes)
    assert problem in caught.value.message and "\n" not in caught.value.message


def test_biases_are_where_the_family_has_them() -> None:
    reference = qwen2()
    config, weights = reference.config.to_dict(), dict(tensors(reference))
    without = {name: tensor for name, tensor in weights.items() if name != "model.layers.1.self_attn.v_proj.bias"}
    with pytest.raises(ConfigError, match=r"lacks tensor model\.layers\.1\.self_attn\.v_proj\.bias"):
        build_from(config, iter(without.items()))
    beyond = weights | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)}
    with pytest.raises(ConfigError, match=r"holds tensor model\.layers\.0\.self_attn\.o_proj\.bias, which"):
        build_from(config, iter(beyond.items()))
