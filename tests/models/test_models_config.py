"""What a family reads of a configuration: every size it needs is missing, or nonsense, once; one line says which.
Through the loader too, where the line gets the file's name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.models import load_family
from octavo.weights.sources.source import resolve
from octavo.worker.load import Loader
from tests.models import checkpoints
from tests.models.test_models_loading import llama_metadata
from tests.weights.gguf_writer import Packed, write_gguf

LLAMA_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
GPT2_SIZES = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
CONFIGS = {"llama": checkpoints.LLAMA, "qwen3": checkpoints.QWEN3, "gpt2": checkpoints.GPT2}
MAX_POSITIONS = "max_position_embeddings"
NONSENSE = [0, -1, "48", "many", 2.5, True, [4, 4], {"a": 1}, float("nan"), "x\ny" * 500]


def refusal(family: str, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_family(family).spec(config)
    assert "\n" not in caught.value.message and len(caught.value.message) < 200
    return caught.value.message


@pytest.mark.parametrize(
    ("family", "key"),
    [("llama", key) for key in LLAMA_SIZES]
    + [("qwen3", key) for key in LLAMA_SIZES]
    + [("gpt2", key) for key in GPT2_SIZES],
)
def test_a_size_is_there_and_is_one(family: str, key: str) -> None:
    config = CONFIGS[family]
    load_family(family).spec(config)
    without = {name: value for name, value in config.items() if name != key}
    assert refusal(family, without).startswith(f"{key} is missing")
    assert refusal(family, config | {key: None}).startswith(f"{key} is missing")
    for value in NONSENSE:
        assert refusal(family, config | {key: value}).startswith(f"{key} is ")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("llama", "max_position_embeddings"),
        ("qwen3", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("qwen3", "max_position_embeddings"),
        ("gpt2", "n_inner"),
    ],
)
def test_a_size_with_a_default_may_be_missing_or_null_and_nothing_else(family: str, key: str) -> None:
    config = CONFIGS[family]
    without = {name: value for name, value in config.items() if name != key}
    assert load_family(family).spec(without) == load_family(family).spec(config | {key: None})
    for value in NONSENSE:
        assert refusal(family, config | {key: value}).startswith(f"{key} is ")


def test_the_first_gpt2_files_call_their_context_otherwise() -> None:
    config = {("n_ctx" if key == "n_positions" else key): value for key, value in checkpoints.GPT2.items()}
    assert load_family("gpt2").spec(config).context_len == 128
    assert refusal("gpt2", config | {"n_ctx": "x"}).startswith("n_ctx is 'x'")


def test_qwen3_has_its_own_defaults() -> None:
    config = {key: value for key, value in checkpoints.QWEN3.items() if key not in ("head_dim", MAX_POSITIONS)}
    spec = load_family("qwen3").spec(config)
    assert (spec.head_size, spec.context_len, spec.has_window) == (128, 32768, False)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_makes_a_context_longer_than_config_json_says(key: str) -> None:
    """As Qwen's model cards tell people to switch it on."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    spec = load_family("qwen3").spec
    assert spec(checkpoints.QWEN3 | {key: yarn}).context_len == 400
    assert spec(checkpoints.QWEN3 | {key: yarn, MAX_POSITIONS: 500}).context_len == 500
    assert spec(checkpoints.QWEN3 | {key: yarn | {"rope_type": "linear"}}).context_len == 128


WINDOW = {"use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize(
    ("changes", "has_window"),
    [
        (WINDOW | {"max_window_layers": 2}, True),
        (WINDOW | {"max_window_layers": 3}, False),
        (WINDOW, False),  # the default, 28, is beyond the last layer
        (WINDOW | {"max_window_layers": 0, "sliding_window": None}, False),
        (WINDOW | {"max_window_layers": 0, "use_sliding_window": False}, False),
        (WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention"] * 3}, False),
        (WINDOW | {"max_window_layers": 9, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, True),
    ],
)
def test_qwen3_says_whether_a_layer_has_a_window(changes: dict[str, Any], has_window: bool) -> None:
    assert load_family("qwen3").spec(checkpoints.QWEN3 | changes).has_window is has_window


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("llama", {"hidden_size": 50}, "hidden_size is 50, which is no multiple of num_attention_heads, 4"),
        ("llama", {"hidden_size": 2}, "hidden_size is 2"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple of num_key_value_heads"),
        ("llama", {"head_dim": 7}, "(head_dim) is 7: it must be even"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ("llama", {"rope_theta": "big"}, "rope_theta is 'big'"),
        ("llama", {"rope_theta": 10**400}, "rope_theta is 1000"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
        ("llama", {"rope_parameters": {"rope_theta": [1]}}, "rope_theta is a list"),
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads is 4, which is no multiple of num_key_value_heads"),
        ("qwen3", {"head_dim": 7}, "(head_dim) is 7: it must be even"),
        ("qwen3", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4'"),
        ("qwen3", {"rope_scaling": {"type": "yarn"}}, "needs a factor"),
        ("qwen3", WINDOW | {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ("qwen3", WINDOW | {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen3", WINDOW | {"max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen3", WINDOW | {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 names"),
        ("qwen3", WINDOW | {"layer_types": ["chunked"] * 3}, "each full_attention or sliding_attention"),
        ("qwen3", WINDOW | {"layer_types": 3}, "layer_types must be a list of 3 names"),
        ("llama", {"original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x'"),
        ("llama", {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1}, "embeddings above 1"),
        ("llama", {"is_causal": False}, "is_causal is false"),
        ("qwen3", {"is_causal": False}, "is_causal is false"),
        ("gpt2", {"is_causal": False}, "is_causal is false"),
        ("gpt2", {"n_embd": 50}, "n_embd is 50, which is no multiple of n_head, 4"),
        ("gpt2", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon is -1.0"),
    ],
)
def test_sizes_that_do_not_fit_and_numbers_that_are_none(family: str, changes: dict[str, Any], problem: str) -> None:
    assert problem in refusal(family, CONFIGS[family] | changes)


# ── with the file's name ────────────────────────────────────────────────────────────────────────────


def load_refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Loader(Config(), resolve(str(path))).load()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama"}, "num_attention_heads is missing"),
        ({"model_type": "qwen3"}, "num_attention_heads is missing"),
        ({"model_type": "gpt2"}, "n_head is missing"),
        ({"model_type": "llama", **checkpoints.LLAMA, "vocab_size": "160"}, "vocab_size is '160'"),
    ],
)
def test_a_folder_with_half_a_configuration(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert load_refusal(tmp_path).startswith(f"{tmp_path / 'config.json'}: {problem}")


def gpt2_metadata() -> dict[str, Any]:
    names = ("embedding_length", "block_count", "attention.head_count", "context_length")
    return dict(zip((f"gpt2.{name}" for name in names), (48, 3, 4, 128), strict=True))


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("llama", {"llama.attention.head_count_kv": [2, 2, 2]}, "llama.attention.head_count_kv is a list"),
        ("llama", {"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ("llama", {"llama.attention.key_length": [12]}, "llama.attention.key_length is a list"),
        ("llama", {"llama.embedding_length": "48"}, "llama.embedding_length is '48'"),
        ("llama", {"llama.embedding_length": 50}, "llama.embedding_length is 50, which is no multiple"),
        ("llama", {"llama.block_count": -3}, "llama.block_count is -3"),
        ("llama", {"llama.context_length": 0}, "llama.context_length is 0"),
        ("llama", {"llama.attention.causal": False}, "is_causal is false"),
        ("llama", {"llama.feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ("llama", {"llama.rope.freq_base": "x"}, "llama.rope.freq_base is 'x'"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": "x"}, "llama.attention.layer_norm_rms_epsilon is 'x'"),
        ("llama", {"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens and llama.vocab_size are missing"),
        ("llama", {"tokenizer.ggml.tokens": 7, "llama.vocab_size": "x"}, "llama.vocab_size is 'x'"),
        ("qwen3", {"qwen3.attention.head_count": 0}, "qwen3.attention.head_count is 0"),
        ("qwen3", {"qwen3.embedding_length": 50}, "qwen3.embedding_length is 50, which is no multiple"),
        ("qwen3", {"qwen3.rope.freq_base": "x"}, "qwen3.rope.freq_base is 'x'"),
        ("gpt2", {}, "tokenizer.ggml.tokens and gpt2.vocab_size are missing"),
        ("gpt2", {"gpt2.feed_forward_length": [192]}, "gpt2.feed_forward_length is a list"),
        ("gpt2", {"gpt2.context_length": None}, "gpt2.context_length is missing"),
        ("gpt2", {"gpt2.attention.head_count": 5, "gpt2.vocab_size": 9}, "n_embd is 48, which is no multiple"),
    ],
)
def test_a_gguf_file_with_nonsense_in_it(tmp_path: Path, family: str, changes: dict[str, Any], problem: str) -> None:
    metadata = (gpt2_metadata() if family == "gpt2" else llama_metadata(family)) | {"general.architecture": family}
    metadata |= changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensor = Packed("output_norm.weight", (2,), "F32", struct.pack("<2f", 1, 2))
    path = write_gguf(tmp_path / "odd.gguf", metadata, [tensor])
    assert load_refusal(path).startswith(f"{path}: {problem}")


def test_a_gguf_file_that_counts_its_parts_in_words(tmp_path: Path) -> None:
    tensor = Packed("output_norm.weight", (2,), "F32", struct.pack("<2f", 1, 2))
    metadata = {"general.architecture": "llama", "split.count": "two"}
    assert "split.count is 'two'" in load_refusal(write_gguf(tmp_path / "odd.gguf", metadata, [tensor]))
