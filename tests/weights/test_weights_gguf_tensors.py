"""Whole GGUF files, with a stand-in for a family file. tests/scalar_quants.py decodes the bytes of each type."""

import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.models import load_family
from octavo.weights.formats.gguf_tensors import GGUFTensors
from tests.scalar_quants import random_quants, scalar
from tests.weights.gguf_writer import Packed, write_gguf


def stand_in_family() -> ModuleType:
    family = ModuleType("stand_in")

    def gguf_name(name: str) -> str | None:
        return None if name.startswith("skip") else f"model.{name}"

    def gguf_fix(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor + config["shift"] if name == "model.shifted" else tensor

    family.gguf_name, family.gguf_fix = gguf_name, gguf_fix  # type: ignore[attr-defined]
    return family


def opened(path: Path, tensors: list[Packed]) -> GGUFTensors:
    file = GGUFFile(write_gguf(path / "m.gguf", {"general.architecture": "llama"}, tensors))
    return GGUFTensors(file, stand_in_family(), {"shift": 1.0})


def floats(name: str, *values: float) -> Packed:
    return Packed(name, (len(values),), "F32", struct.pack(f"<{len(values)}f", *values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_is_streamed_in_translated_names_shapes_and_the_asked_type(tmp_path: Path, dtype: torch.dtype) -> None:
    quants = random_quants("Q4_K", 6, 1)
    weights = opened(
        tmp_path,
        [
            floats("a", 1.0, 2.0),
            Packed("matrix", (3, 512), "Q4_K", quants),
            floats("shifted", 0.125, -3.0),
            Packed("skip_me", (256,), "IQ2_XXS", bytes(66)),
            Packed("half", (2, 2), "F16", struct.pack("<4e", 1, 2, 3, 4)),
        ],
    )
    got = dict(weights.tensors("cpu", dtype))
    assert list(got) == ["model.a", "model.matrix", "model.shifted", "model.half"]
    assert all(tensor.dtype == dtype for tensor in got.values())
    want = torch.tensor(scalar("Q4_K", quants)).view(3, 512)
    torch.testing.assert_close(got["model.matrix"].float(), want, rtol=2**-7, atol=1e-3)
    assert got["model.shifted"].tolist() == [1.125, -2.0]
    assert got["model.half"].tolist() == [[1, 2], [3, 4]]
    assert weights.num_bytes == 8 + 6 * 144 + 8 + 8
    assert dict(weights.tensors("cpu", dtype)).keys() == got.keys(), "a checkpoint can be read twice"


def test_writing_to_a_streamed_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    weights = opened(tmp_path, [floats("a", 1.0, 2.0)])
    before = (tmp_path / "m.gguf").read_bytes()
    for _, tensor in weights.tensors("cpu", torch.float32):
        tensor.zero_()
    assert (tmp_path / "m.gguf").read_bytes() == before


def test_the_stored_type_is_that_of_most_bytes(tmp_path: Path) -> None:
    assert opened(tmp_path, [floats("a", *range(100))]).stored_dtype == "float32"
    halves = Packed("h", (100,), "F16", bytes(200))
    assert opened(tmp_path, [floats("a", 1.0), halves]).stored_dtype == "float16"
    quants = Packed("q", (32, 32), "Q4_1", bytes(640))
    assert opened(tmp_path, [floats("a", 1.0), halves, quants]).stored_dtype == "bfloat16"


@pytest.mark.parametrize(("type", "num_bytes"), [("IQ2_XS", 74), ("TQ1_0", 54)])
def test_a_type_without_a_decoder_is_refused_when_the_file_is_opened(tmp_path: Path, type: str, num_bytes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, [Packed("blk.0.w", (256,), type, bytes(num_bytes))])
    message = caught.value.message
    assert "blk.0.w" in message and type in message and "Q4_1" in message and "Q6_K" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.11.ffn_gate_shexp.weight", "blk.0.attn_sinks"])
def test_a_tensor_of_a_layer_that_the_family_does_not_know_is_refused(name: str, tmp_path: Path) -> None:
    """Ignoring it would change every answer."""
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {}, [floats("blk.0.attn_norm.weight", 1.0), floats(name, 1.0)]))
    with pytest.raises(ConfigError, match=f"'{name}' is no tensor of this architecture's layers"):
        GGUFTensors(file, load_family("llama"), {})


def test_frequencies_in_old_files_are_left_out(tmp_path: Path) -> None:
    tensors = [floats("blk.0.attn_norm.weight", 1.0), floats("blk.0.attn_rot_embd.weight", 1.0)]
    weights = GGUFTensors(GGUFFile(write_gguf(tmp_path / "m.gguf", {}, tensors)), load_family("llama"), {})
    assert weights.num_bytes == 4
