"""Folders and GGUF files as checkpoints: what is read, what is refused, and what must not be imported."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ConfigError
from octavo.weights.formats.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.sources.source import resolve
from tests.weights.gguf_writer import Packed, write_gguf

FIRST = {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.tensor([0.5, -0.25, 8.0])}
SECOND = {"b.weight": torch.linspace(-1, 1, 10).view(2, 5)}


def model_folder(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return path


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded_folder(path: Path) -> Path:
    folder = model_folder(path)
    save_file(FIRST, folder / "model-00001-of-00002.safetensors")
    save_file(SECOND, folder / "model-00002-of-00002.safetensors")
    write_index(
        folder,
        dict.fromkeys(FIRST, "model-00001-of-00002.safetensors")
        | dict.fromkeys(SECOND, "model-00002-of-00002.safetensors"),
    )
    return folder


def read(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.tensors("cpu", dtype)}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


# --- safetensors ---


def test_one_file(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", hidden_size=4)
    save_file(FIRST, folder / "model.safetensors")
    checkpoint = open_checkpoint(resolve(str(folder)))
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 4}
    assert (checkpoint.stored_dtype, checkpoint.num_bytes) == ("float32", 60)
    assert_same(read(checkpoint), FIRST)
    assert_same(read(checkpoint, torch.bfloat16), {name: tensor.bfloat16() for name, tensor in FIRST.items()})


def test_shards_with_an_index_and_without(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    assert_same(read(open_checkpoint(folder)), FIRST | SECOND)
    (folder / "model.safetensors.index.json").unlink()
    assert_same(read(open_checkpoint(folder)), FIRST | SECOND)


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    save_file({**SECOND, "left.over": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    assert_same(read(open_checkpoint(folder)), FIRST | SECOND)


def test_adapters_and_consolidated_copies_are_left_out(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    save_file(FIRST, folder / "weights.safetensors")
    save_file({"other.name": torch.ones(3)}, folder / "consolidated.safetensors")
    save_file({"lora_A": torch.ones(3)}, folder / "adapter_model.safetensors")
    assert_same(read(open_checkpoint(folder)), FIRST)


def test_the_stored_type_is_that_of_most_bytes_and_integers_keep_theirs(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", torch_dtype="float32")
    tensors = {
        "w": torch.ones(100, dtype=torch.bfloat16),
        "norm": torch.ones(3),
        "ids": torch.arange(1000),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.stored_dtype == "bfloat16"
    got = read(checkpoint, torch.float16)
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "w": torch.float16,
        "norm": torch.float16,
        "ids": torch.int64,
        "mask": torch.bool,
    }
    assert torch.equal(got["ids"], tensors["ids"])


def test_writing_to_a_streamed_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    save_file(FIRST, folder / "model.safetensors")
    for _, tensor in open_checkpoint(folder).tensors("cpu", torch.float32):
        tensor.zero_()
    assert_same(read(open_checkpoint(folder)), FIRST)


def test_every_truncation_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    save_file(FIRST, path)
    whole = path.read_bytes()
    for length in [*range(40), *range(40, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        message = refusal(folder)
        assert "model.safetensors" in message and "fetch it again" in message, (length, message)


def test_a_garbled_header_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    save_file(FIRST, path)
    whole = path.read_bytes()
    for junk in (b"\xff" * 8 + whole[8:], whole[:8] + b"{]" + whole[10:], whole + b"tail", b"<html>not found</html>"):
        path.write_bytes(junk)
        assert "truncated or corrupt" in refusal(folder)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors" in message and "model-00001" not in message
    (folder / "model.safetensors.index.json").unlink()
    assert "1 of the 2 files" in refusal(folder)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}'):
        index.write_text(text)
        assert "index.json" in refusal(folder)
    save_file(FIRST, tmp_path / "outside.safetensors")
    write_index(folder, dict.fromkeys(FIRST, "../outside.safetensors"))
    assert "../outside.safetensors" in refusal(folder), "an index does not lead out of its folder"
    write_index(folder, {"c.weight": "model-00001-of-00002.safetensors"})
    assert "c.weight" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    save_file(FIRST, folder / "one.safetensors")
    save_file(FIRST, folder / "two.safetensors")
    message = refusal(folder)
    assert "one.safetensors" in message and "two.safetensors" in message


def test_types_that_need_scales_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    save_file({"w": torch.ones(4).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    assert "F8_E4M3" in refusal(folder)
    model_folder(folder, quantization_config={"quant_method": "gptq"})
    assert "gptq, 4 bits does not account for" in refusal(folder)
    model_folder(folder, quantization_config={"quant_method": "quip"})
    assert "quantised by 'quip'" in refusal(folder) and "awq" in refusal(folder)


def test_files_without_a_weight_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    save_file({"ids": torch.arange(3)}, folder / "model.safetensors")
    assert "without a weight" in refusal(folder)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(FIRST, folder / "model.safetensors")
    for text in (b"", b"{", b"[1]", b"\xff\xfe", b'{"hidden_size": 4}', b'{"model_type": 3}', b"[" * 100_000):
        (folder / "config.json").write_bytes(text)
        assert "config.json" in refusal(folder)


def test_a_configuration_alone_will_do_where_weights_may_be_missing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", torch_dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    assert "no weights" in refusal(folder)
    checkpoint = open_checkpoint(folder, allow_missing_weights=True)
    assert (checkpoint.stored_dtype, checkpoint.num_bytes) == ("bfloat16", 0)
    assert open_checkpoint(model_folder(folder, dtype="int8"), allow_missing_weights=True).stored_dtype == "float32"


# --- GGUF ---


@pytest.fixture
def stand_in_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family, "llama", with a name table, and one that cannot read GGUF files."""
    llama, other, models = ModuleType("llama"), ModuleType("other"), ModuleType("octavo.models")
    llama.gguf_config = lambda metadata, tensors: {  # type: ignore[attr-defined]
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    llama.gguf_name = {"token_embd.weight": "embed"}.get  # type: ignore[attr-defined]
    llama.gguf_fix = lambda name, tensor, config: tensor * config["hidden_size"]  # type: ignore[attr-defined]
    models.load_gguf_family = {"llama": llama, "other": other}.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.models", models)


EMBED = Packed("token_embd.weight", (2, 2), "F32", struct.pack("<4f", 1, 2, 3, 4))
METADATA = {"general.architecture": "llama", "llama.embedding_length": 2}


@pytest.mark.usefixtures("stand_in_families")
def test_a_gguf_file_goes_through_its_family(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", METADATA, [EMBED, Packed("rope_freqs.weight", (1,), "F32", bytes(4))])
    source = resolve(str(path))
    assert (source.kind, source.name) == ("gguf", "tiny")
    checkpoint = open_checkpoint(source)
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 2, "tie_word_embeddings": True}
    assert (checkpoint.stored_dtype, checkpoint.num_bytes) == ("float32", 16)
    assert_same(read(checkpoint), {"embed": torch.tensor([[2.0, 4.0], [6.0, 8.0]])})


@pytest.mark.usefixtures("stand_in_families")
@pytest.mark.parametrize(
    ("metadata", "tensors", "problem"),
    [
        ({"llama.embedding_length": 2}, [EMBED], "general.architecture"),
        ({"general.architecture": "other"}, [EMBED], "safetensors"),
        ({**METADATA, "split.count": 3}, [EMBED], "is one of 3 parts"),
        (METADATA, [], "no weights"),
    ],
)
def test_gguf_files_that_are_no_whole_model(
    tmp_path: Path, metadata: dict[str, Any], tensors: list[Packed], problem: str
) -> None:
    assert problem in refusal(write_gguf(tmp_path / "tiny.gguf", metadata, tensors))


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", METADATA, [EMBED])
    path.write_bytes(path.read_bytes()[:-20])
    assert "truncated" in refusal(path)


@pytest.mark.model
def test_the_embedded_model_is_read_whole() -> None:
    checkpoint = open_checkpoint(resolve(""))
    assert checkpoint.config["model_type"] == "llama" and checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["tie_word_embeddings"] is True
    shapes = {}
    for name, tensor in checkpoint.tensors("cpu", torch.float32):
        shapes[name] = tuple(tensor.shape)
        least, most = (value.item() for value in torch.aminmax(tensor))  # NaN where there is one
        assert -100 < least < most < 100, name
    assert len(shapes) == 272
    assert shapes["model.embed_tokens.weight"] == (49152, 576)
    assert shapes["model.layers.29.mlp.down_proj.weight"] == (576, 1536)


# --- what must stay cheap ---


def test_opening_a_folder_does_not_load_torch(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    program = (
        "import sys; from pathlib import Path\n"
        "from octavo.weights.sources.source import resolve\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "from octavo.weights.formats.checkpoint import open_checkpoint\n"
        "assert open_checkpoint(resolve(sys.argv[1])).config['model_type'] == 'llama'\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


def test_streaming_keeps_only_one_tensor(tmp_path: Path) -> None:
    """16 tensors of 8 MiB in two shards: reading them all must not grow the process by more than a shard and a bit."""
    folder = model_folder(tmp_path / "m")
    for shard in range(2):
        tensors = {f"t{shard}.{i}": torch.full((1 << 22,), float(i), dtype=torch.bfloat16) for i in range(8)}
        save_file(tensors, folder / f"model-{shard + 1:05}-of-00002.safetensors")
    program = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from octavo.weights.formats.checkpoint import open_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "for name, tensor in open_checkpoint(Path(sys.argv[1])).tensors('cpu', torch.float32):\n"
        "    assert tensor[-1] == int(name[-1])\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)
    grown = int(ran.stdout)  # MiB; one shard is 64 as stored, one tensor 16 as float32, the whole 256 as float32
    assert grown < 64 + 4 * 16, grown
