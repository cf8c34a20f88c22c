"""Adapters on disk: what is read, and that everything else is refused by its name, in one line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError
from octavo.weights.adapters.adapter_file import AdapterFile, check_rank, open_adapter, stamp_of
from tests.adapters import ALL, write_peft
from tests.weights.gguf_writer import Packed, write_gguf

WEIGHTS = {
    "model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32),
    "model.layers.0.self_attn.v_proj.weight": torch.zeros(16, 32),
    "model.layers.0.mlp.down_proj.weight": torch.zeros(32, 48),
}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_peft(tmp_path / "adapter", WEIGHTS, rank=4, targets=ALL)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, **renamed: str) -> None:
    """Rename parts of the tensors' names."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)


def test_a_peft_folder(folder: Path) -> None:
    adapter = open_adapter(folder)
    assert set(adapter.pairs) == {name.removesuffix(".weight") for name in WEIGHTS}
    pair = adapter.pairs["model.layers.0.mlp.down_proj"]
    assert (pair.rank, pair.in_features, pair.out_features, pair.scale) == (4, 48, 32, 4.0)
    assert adapter.max_rank == 4 and adapter.base == "tiny"
    assert adapter.num_weights == 16 * (32 + 32 + 32 + 16 + 48 + 32)  # ranks are padded to 16
    down, up = adapter.matrices(Q)
    stored = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(down, stored[f"base_model.model.{Q}.lora_A.weight"])
    assert torch.equal(up, stored[f"base_model.model.{Q}.lora_B.weight"])


def test_scales(folder: Path) -> None:
    change_config(folder, use_rslora=True)
    assert open_adapter(folder).pairs[Q].scale == 16 / math.sqrt(4)
    change_config(folder, use_rslora=False, alpha_pattern={"q_proj": 2, r"^model\.layers\.0\.mlp\.down_proj": 6})
    pairs = open_adapter(folder).pairs
    assert (pairs[Q].scale, pairs["model.layers.0.mlp.down_proj"].scale) == (0.5, 1.5)
    assert pairs["model.layers.0.self_attn.v_proj"].scale == 4.0


def test_names_with_the_adapters_own(folder: Path) -> None:
    change_tensors(folder, **{"lora_A.weight": "lora_A.default.weight", "lora_B.weight": "lora_B.default.weight"})
    assert Q in open_adapter(folder).pairs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["self_attn.q_proj.weight"]}, "only experts' gate_up_proj and down_proj"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "whole number"),
        ({"r": 8}, "has rank 4, and adapter_config.json says 8"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "only names of modules"),
        ({"rank_pattern": [1]}, "object of numbers"),
    ],
)
def test_settings_that_are_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    change_config(folder, **values)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as error:
        open_adapter(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lora_B.weight", "lora_magnitude_vector", "DoRA"),
        ("lora_A", "lora_embedding_A", "embedding"),
        ("q_proj.lora_A.weight", "q_proj.weight", "modules_to_save"),
        ("q_proj.lora_B.weight", "q_proj.lora_B.bias", "not a matrix"),
        ("q_proj.lora_A", "o_proj.lora_A", "only lora_"),
    ],
)
def test_tensors_that_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    change_tensors(folder, **{old: new})
    with pytest.raises(ConfigError, match=message):
        open_adapter(folder)


def test_shapes_that_are_refused(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"base_model.model.{Q}.lora_B.weight"
    for wrong, message in (
        (torch.zeros(32, 5), "both are its rank"),
        (torch.zeros(32), "a matrix of floats"),
        (torch.zeros(32, 4, dtype=torch.int32), "a matrix of floats"),
    ):
        save_file(tensors | {name: wrong}, path)
        with pytest.raises(ConfigError, match=message):
            open_adapter(folder)


def test_ranks_above_the_limits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 257; ranks up to 256"):
        open_adapter(write_peft(tmp_path / "a", WEIGHTS, rank=257))
    file = open_adapter(write_peft(tmp_path / "b", WEIGHTS, rank=20))
    check_rank(file, 20)
    with pytest.raises(ConfigError, match=r"rank 20; the limit is 16 \(--max-lora-rank"):
        check_rank(file, 16)


def test_files_that_are_missing_or_damaged(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_adapter(tmp_path / "nowhere")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        open_adapter(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter_model\.safetensors"):
        open_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="pickled weights"):
        open_adapter(folder)
    config = folder / "adapter_config.json"
    for content, message in ((b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "must be a JSON object")):
        config.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            open_adapter(folder)
    config.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        open_adapter(folder)
    config.unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        open_adapter(folder)


def test_an_empty_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty"):
        open_adapter(write_peft(tmp_path / "a", WEIGHTS, targets=("none",)))


def test_a_stamp_changes_with_the_files(folder: Path) -> None:
    before = stamp_of(folder)
    assert before == stamp_of(folder)
    (folder / "README.md").write_text("other files do not matter")
    assert before == stamp_of(folder)
    change_config(folder, lora_alpha=17)
    assert before != stamp_of(folder)
    with pytest.raises(ConfigError, match="cannot read"):
        stamp_of(folder / "nowhere")


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────

METADATA = {
    "general.type": "adapter",
    "general.architecture": "llama",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}
A, B = torch.randn(4, 32), torch.randn(16, 4)


def packed(name: str, tensor: torch.Tensor, kind: str = "F32") -> Packed:
    data = tensor.numpy().astype(np.float16 if kind == "F16" else np.float32).tobytes()
    return Packed(name, tuple(tensor.shape), kind, data)


def gguf(path: Path, metadata: dict[str, Any] | None = None, *tensors: Packed) -> AdapterFile:
    given = tensors or (packed("blk.0.attn_v.weight.lora_a", A), packed("blk.0.attn_v.weight.lora_b", B, "F16"))
    return open_adapter(write_gguf(path / "adapter.gguf", METADATA | (metadata or {}), list(given)))


def test_a_gguf_adapter(tmp_path: Path) -> None:
    adapter = gguf(tmp_path)
    pair = adapter.pairs["blk.0.attn_v"]
    assert (pair.rank, pair.in_features, pair.out_features, pair.scale) == (4, 32, 16, 2.0)
    down, up = adapter.matrices("blk.0.attn_v")
    assert torch.equal(down, A) and torch.equal(up, B.half().float())
    assert gguf(tmp_path, {"adapter.lora.alpha": 0.0}).pairs["blk.0.attn_v"].scale == 1.0  # as llama.cpp has it


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.type": "model"}, (), "not of an adapter"),
        ({"adapter.type": "ia3"}, (), "only lora"),
        ({"adapter.lora.alpha": "x"}, (), "must be a number"),
        ({}, (packed("blk.0.attn_v.weight.lora_a", A),), "only lora_a"),
        ({}, (packed("token_embd.weight", A),), "not a matrix"),
        (
            {},
            (packed("blk.0.attn_v.weight.lora_a", A), packed("blk.0.attn_v.weight.lora_b", torch.zeros(16, 5))),
            "no two matrices of one rank",
        ),
    ],
)
def test_gguf_adapters_that_are_refused(
    tmp_path: Path, metadata: dict[str, Any], tensors: tuple[Packed, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gguf(tmp_path, metadata, *tensors)


def test_a_truncated_gguf_adapter(tmp_path: Path) -> None:
    gguf(tmp_path)
    path = tmp_path / "adapter.gguf"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="is truncated"):
        open_adapter(path)
