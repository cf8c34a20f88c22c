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
from octavo.weights.sources.identity import weights_identity
from octavo.weights.sources.source import resolve
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


# --- a model in several files ---


def split_model(folder: Path, *, total: int = 3) -> list[Path]:
    """One tensor in each part; the names are those that llama.cpp's splitter gives."""
    paths = []
    for number in range(total):
        metadata: dict[str, object] = {"split.no": number, "split.count": total, "split.tensors.count": total}
        path = folder / f"tiny-{number + 1:05}-of-{total:05}.gguf"
        paths.append(
            write_gguf(path, metadata, [Packed(f"t{number}", (2, 4), "F32", struct.pack("<8f", *[number] * 8))])
        )
    return paths


def test_tensors_of_all_parts_are_read(tmp_path: Path) -> None:
    file = GGUFFile(split_model(tmp_path)[0])
    assert list(file.tensors) == ["t0"]
    file.join_parts()
    weights = GGUFTensors(file, stand_in_family(), {"shift": 0.0})
    found = {name: float(tensor.flatten()[0]) for name, tensor in weights.tensors("cpu", torch.float32)}
    assert sorted(found.values()) == [0.0, 1.0, 2.0] and len(found) == 3
    assert weights.num_bytes == 3 * 32


def test_any_part_names_the_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    for path in paths:
        source = resolve(str(path))
        assert (source.path, source.name, source.kind) == (paths[0], "tiny", "gguf")
    whole = weights_identity(resolve(str(paths[0])), is_dummy=False)
    paths[2].write_bytes(paths[2].read_bytes()[:-1] + b"x")
    assert weights_identity(resolve(str(paths[0])), is_dummy=False) != whole, "every part counts"
    paths[1].unlink()
    with pytest.raises(ConfigError, match=r"tiny-00002-of-00003\.gguf are missing"):
        resolve(str(paths[0]))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    (tmp_path / "other").mkdir()
    others = split_model(tmp_path / "other", total=2)
    paths[1].write_bytes(others[1].read_bytes())
    with pytest.raises(ConfigError, match="not part 2 of 3"):
        GGUFFile(paths[0]).join_parts()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ConfigError, match="not part 2 of 3"):
        GGUFFile(paths[0]).join_parts()
    lone = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match=r"named so: .*-00001-of-00003.gguf"):
        GGUFFile(lone).join_parts()
    twice: dict[str, object] = {"split.no": 1, "split.count": 2}
    for number in range(2):
        metadata = twice | {"split.no": number}
        write_gguf(tmp_path / f"t-{number + 1:05}-of-00002.gguf", metadata, [Packed("t0", (2, 4), "F32", bytes(32))])
    with pytest.raises(ConfigError, match="both hold the tensor 't0'"):
        GGUFFile(tmp_path / "t-00001-of-00002.gguf").join_parts()
