"""Which family a model is of, by the names that config.json and GGUF files give it, and the error for an unknown one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ConfigError
from octavo.models import families, family_of, find_family, load_family
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.sources.source import resolve
from tests.models import checkpoints
from tests.weights.gguf_writer import Packed, write_gguf


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(resolve(str(path)))
    assert "\n" not in caught.value.message and len(caught.value.message) < 400 + len(str(path))
    return caught.value.message


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LlamaForCausalLM", "llama"),
        ("GPT2LMHeadModel", "gpt2"),
        ("Qwen3Model", "qwen3"),
        ("QWEN2", "qwen2"),
        ("qwen-2", "qwen2"),
        ("Model", None),
        ("ForCausalLM", None),
        ("llamas", None),
    ],
)
def test_a_family_is_found_by_its_other_names(name: str, family: str | None) -> None:
    assert find_family(name) == family


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "llama", "architectures": ["GPT2LMHeadModel"]}, "llama"),
        ({"architectures": ["GPT2LMHeadModel"]}, "gpt2"),
        ({"model_type": None, "architectures": ["Qwen2ForCausalLM"]}, "qwen2"),
        ({"model_type": "", "architectures": ["Qwen2ForCausalLM"]}, "qwen2"),
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
        ({"architectures": []}, None),
        ({"architectures": [7]}, None),
        ({"architectures": "LlamaForCausalLM"}, None),
        ({"model_type": 7}, None),
        ({}, None),
    ],
)
def test_what_a_configuration_says_that_it_is(config: dict[str, Any], family: str | None) -> None:
    assert family_of(config) == family


def test_a_folder_without_model_type_is_read_by_its_architecture(tmp_path: Path) -> None:
    config = checkpoints.LLAMA | {"architectures": ["LlamaForCausalLM"]}
    opened = open_checkpoint(resolve(str(folder_with(tmp_path, config))))
    assert opened.config["model_type"] == "llama"
    assert load_family(opened.config["model_type"]).spec(opened.config).num_layers == 3


@pytest.mark.parametrize(
    ("config", "problem", "near"),
    [
        ({"model_type": "llama9"}, "model_type 'llama9'", "llama"),
        ({"model_type": "own", "architectures": ["Qwen3ForCausalLM"]}, "model_type 'own'", "qwen3"),
        ({"architectures": ["Qwen4ForCausalLM"]}, "architecture 'Qwen4ForCausalLM'", "qwen"),
        ({"model_type": "zzzz", "architectures": 5}, "model_type 'zzzz'", None),
        ({"model_type": "x" * 999}, "model_type 'xxxxx", None),
    ],
)
def test_the_error_for_an_unknown_one_names_what_is_supported(
    tmp_path: Path, config: dict[str, Any], problem: str, near: str | None
) -> None:
    message = refusal(folder_with(tmp_path, config))
    assert problem in message and f"; the supported ones are {', '.join(families())}" in message
    assert f"; did you mean {near}" in message if near else "did you mean" not in message


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert 'names no "model_type" and no "architectures"' in refusal(folder_with(tmp_path, {"hidden_size": 4}))


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    tensor = Packed("output_norm.weight", (2,), "F32", bytes(8))
    path = write_gguf(tmp_path / "odd.gguf", {"general.architecture": "llama-9"}, [tensor])
    message = refusal(path)
    assert message.startswith(f"{path}: general.architecture 'llama-9' is not supported; the supported ones are ")
    assert message.endswith("; did you mean llama?")
