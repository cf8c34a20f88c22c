"""The GGUF container: what was written is read back, and every damaged file is refused in one line."""

import random
import struct
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from tests.weights.gguf_writer import Packed, gguf_bytes, write_gguf

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.flag": True,
    "a.count": 7,
    "a.negative": -5,
    "a.large": 2**40,
    "a.ratio": 0.5,
    "words": ["", "one", "zwei", "三", "\udcff"],
    "numbers": [1, 2, 3],
    "ratios": [0.25, -1.0],
    "flags": [True, False],
    "nothing": [],
    "nested": [[1, 2], [3]],
}
TENSORS = [
    Packed("first", (2, 3), "F32", struct.pack("<6f", *range(6))),
    Packed("second", (1, 32), "Q8_0", bytes(range(34))),
    Packed("third", (4,), "BF16", b"\x80\x3f" * 4),
]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        GGUFFile(path)
    message = caught.value.message
    assert "\n" not in message and str(path) in message
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_what_was_written_is_read_back(tmp_path: Path, version: int) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, version=version))
    assert file.metadata == METADATA
    assert list(file.tensors) == ["first", "second", "third"]
    assert file.tensors["first"].shape == (2, 3)
    assert [entry.type for entry in file.tensors.values()] == ["F32", "Q8_0", "BF16"]
    for tensor in TENSORS:
        assert bytes(file.bytes_of(tensor.name)) == tensor.data


def test_another_alignment_moves_the_tensors(tmp_path: Path) -> None:
    metadata = {**METADATA, "general.alignment": 128}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, TENSORS, alignment=128))
    assert all(entry.offset % 128 == 0 for entry in file.tensors.values())
    assert bytes(file.bytes_of("third")) == TENSORS[2].data


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes(METADATA, TENSORS)
    last_byte = len(whole) - (-len(TENSORS[2].data) % 32)  # what follows is padding
    path = tmp_path / "m.gguf"
    for length in [*range(0, last_byte, 5), last_byte - 1]:
        path.write_bytes(whole[:length])
        refusal(path)
    path.write_bytes(whole[:last_byte])
    GGUFFile(path)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_is_read_or_refused_and_nothing_else(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole = gguf_bytes(METADATA, TENSORS)
    path = tmp_path / "m.gguf"
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(whole) - 64)] = rng.choice((0, 1, 9, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
        except ConfigError as error:
            num_refused += 1
            assert "\n" not in error.message
        else:
            for name, entry in file.tensors.items():
                assert len(file.bytes_of(name)) == entry.num_bytes
    assert num_refused > 100


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    deep = struct.pack("<IQ", 9, 1) * 100_000
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + deep)
    assert "corrupt" in refusal(path)


def test_what_is_no_gguf_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert "cannot read" in refusal(path)
    assert "cannot read" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "0 bytes" in refusal(path)
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    assert "not a GGUF file" in refusal(path)
    write_gguf(path, METADATA, TENSORS, version=1)
    assert "version 1" in refusal(path)


@pytest.mark.parametrize("alignment", [0, 12, "wide", 1])
def test_an_impossible_alignment_is_refused(tmp_path: Path, alignment: object) -> None:
    assert "alignment" in refusal(
        write_gguf(tmp_path / "m.gguf", {**METADATA, "general.alignment": alignment}, TENSORS)
    )


def test_a_row_that_is_no_multiple_of_its_type_is_refused(tmp_path: Path) -> None:
    broken = Packed("odd", (2, 16), "Q8_0", bytes(34))
    assert "odd" in refusal(write_gguf(tmp_path / "m.gguf", METADATA, [broken]))


def test_a_type_nobody_knows_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes({"general.architecture": "llama"}, [Packed("t", (4,), "F32", bytes(16))])
    kind_at = data.index(struct.pack("<IQIQ", 1, 4, 0, 0)) + 12
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:kind_at] + struct.pack("<I", 250) + data[kind_at + 4 :])
    assert "unknown type 250" in refusal(path)
